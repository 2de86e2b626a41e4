#pragma once

#include <tessera/comm.h>
#include <tessera/mesh.h>
