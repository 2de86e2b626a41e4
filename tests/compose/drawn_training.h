#pragma once

#include "compose/drawn_tree.h"
#include "support/trainee.h"

#include <functional>
#include <memory>

/// How a drawn tree is trained.
namespace tessera::testing {

/// A parameter that several modules share counts once.
Trainee trainee_of(const Part& root);

/// One process that computes as so many ranks in bfloat16: each part of a batch by a rounded copy
/// of the tree, whose gradients add up in the float64 ones of the tree itself.
Trainee low_reference(const std::function<Part()>& make, int64_t ranks);

/// The same, but forward first learns from half of each of `ranks` parts of a batch, to whose
/// gradients those of the other half are added; the first without communication if there is a
/// parallel module.
Trainee in_two_batches(Trainee trainee, int64_t ranks, std::shared_ptr<torch::nn::Module> parallel);

}  // namespace tessera::testing
