#pragma once

#include <tessera/autocast.h>
#include <tessera/checkpoint.h>
#include <tessera/comm.h>
#include <tessera/compile.h>
#include <tessera/data.h>
#include <tessera/dtensor.h>
#include <tessera/fully_shard.h>
#include <tessera/lora.h>
#include <tessera/mesh.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>
#include <tessera/serialize.h>
#include <tessera/state_dict.h>
#include <tessera/trace.h>
