#pragma once

#include <tessera/data/loader.h>
#include <tessera/data/sampler.h>

/// Who of the ranks sees which samples, and how they come to the device.
