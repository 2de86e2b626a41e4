#pragma once

#include "train/settings.h"

namespace tessera::train {

/// Which of libtorch's kernels scaled_dot_product_attention asks first on a GPU, as --attention
/// says; one that cannot compute a call passes it on to the next. auto: cuDNN's with 16 bits, where
/// it is the faster one, and libtorch's own order with fp32. Holds for the process.
void choose_attention(const Settings& settings);

}  // namespace tessera::train
