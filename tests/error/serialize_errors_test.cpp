#include <tessera/tessera.h>

#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// One parameter and one buffer, called and shaped as a test wants.
struct SmallNet : torch::nn::Module {
  explicit SmallNet(const at::Tensor& value, const std::string& name = "w",
                    const std::string& buffer = "b") {
    register_parameter(name, value);
    register_buffer(buffer, at::zeros({2}));
  }
};

class SerializeErrors : public ::testing::Test {
 protected:
  std::string in(const std::string& name) const { return (folder_.path() / name).string(); }

  TemporaryFolder folder_;
  SmallNet net_{at::ones({2, 3})};
};

TEST_F(SerializeErrors, PathsThatNoCheckpointCanHave) {
  EXPECT_THAT(message_of([&] { save("", net_); }),
              StartsWith("save: expected the path of a folder, got an empty one"));
  EXPECT_THAT(message_of([&] { save("/", net_); }), HasSubstr("root of the file system"));
  std::ofstream(in("file")) << "mine";
  EXPECT_THAT(message_of([&] { save(in("file"), net_); }),
              AllOf(StartsWith("save: " + in("file")), HasSubstr("left as it is")));
  fs::create_directories(in("folder"));
  std::ofstream(in("folder/notes.txt")) << "mine";
  EXPECT_THAT(message_of([&] { save(in("folder"), net_); }), HasSubstr("left as it is"));
  EXPECT_TRUE(fs::exists(in("folder/notes.txt")));
  fs::create_directories(in("page"));
  std::ofstream(in("page/index.json")) << "{}";  // not everything with an index is a checkpoint
  EXPECT_THAT(message_of([&] { save(in("page"), net_); }), HasSubstr("left as it is"));
  save(in("ours"), net_);
  std::ofstream(in("ours/notes.txt")) << "mine";
  EXPECT_THAT(message_of([&] { save(in("ours"), net_); }), HasSubstr("left as it is"));
  EXPECT_THAT(message_of<c10::Error>([&] { save(in("file/below"), net_); }),
              HasSubstr("could not make the folder"));
  EXPECT_THAT(message_of<c10::Error>([&] { save("/proc/none/a", net_); }),
              HasSubstr("could not make the folder"));
}

TEST_F(SerializeErrors, AFolderThatMayNotBeWritten) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  fs::create_directories(in("shut"));
  fs::permissions(in("shut"), fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_THAT(message_of<c10::Error>([&] { save(in("shut/a"), net_); }),
              HasSubstr("Permission denied"));
}

TEST_F(SerializeErrors, WhatCannotBeSaved) {
  EXPECT_THAT(message_of([&] { save(in("a"), net_, {}, {.keep_last = -1}); }),
              HasSubstr("keep_last of at least 0, got -1"));
  SmallNet reserved(at::ones({1}), "optimizer/w");
  EXPECT_THAT(message_of([&] { save(in("a"), reserved); }), HasSubstr("got 'optimizer/w'"));
  SmallNet complex(at::ones({1}, at::kComplexDouble));
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { save(in("a"), complex); }),
              HasSubstr("ComplexDouble"));
  SmallNet binary(at::ones({1}), "\xff");
  EXPECT_THAT(message_of([&] { save(in("a"), binary); }), HasSubstr("names in UTF-8"));
  EXPECT_THAT(message_of([&] { save(in("a"), net_, {{"\xff", "x"}}); }),
              HasSubstr("names in UTF-8"));
  torch::optim::LBFGS unknown(net_.parameters());
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { save(in("a"), net_, unknown); }),
              HasSubstr("save: expected an optimizer of tessera::optim"));
  torch::optim::SGD other({at::ones({1}).requires_grad_()}, 0.1);
  EXPECT_THAT(message_of([&] { save(in("a"), net_, other); }),
              HasSubstr("save: expected an optimizer of parameters of"));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(SerializeErrors, RanksThatDoNotSaveOneModel) {
  run_threads(2, [&] {
    SmallNet own(at::ones({2 + rank()}));
    EXPECT_THAT(message_of([&] { save(in("a"), own); }),
                AllOf(HasSubstr("'w'"), HasSubstr("[2] Float on rank 0 and [3] Float on rank 1")));
    SmallNet same(at::ones({2}));
    optim::SGD optimizer(same.parameters(), {.lr = 0.1 * (1 + rank())});
    EXPECT_THAT(message_of([&] { save(in("a"), same, optimizer); }), HasSubstr("same options"));
    // Of a group that lacks ranks of the tensor's mesh.
    nn::Linear sharded(3, 4);
    fully_shard(sharded);
    const auto alone = new_group({rank()});
    EXPECT_THAT(
        message_of([&] { save(in(std::to_string(rank())), sharded, {}, {.group = alone}); }),
        AllOf(HasSubstr("make up the whole"), HasSubstr("'bias'")));
    const SummonFullParams whole(sharded);
    EXPECT_THAT(message_of<c10::Error>([&] { save(in("a"), sharded); }), HasSubstr("save"));
  });
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(SerializeErrors, OnSeveralRanksNameThem) {
  for (const auto& [size, others] : {std::pair(2, "rank 1"), std::pair(3, "ranks 1 and 2")}) {
    run_threads(size, [&] {
      SmallNet net(at::ones({1}));
      EXPECT_THAT(message_of([&] { save(in("a"), net, {}, {.keep_last = -1}); }),
                  AllOf(StartsWith("save: rank 0: "),
                        HasSubstr(c10::str(" (and an error on ", others, ")"))));
    });
  }
}

TEST_F(SerializeErrors, CheckpointsOfAnotherModelNameTheDifference) {
  save(in("a"), net_, {{"step", "1"}});
  const auto refused = [&](const at::Tensor& value, const std::string& name,
                           const std::string& buffer) {
    SmallNet other(value, name, buffer);
    const auto before = other.parameters()[0].detach().clone();
    auto message = message_of([&] { load(in("a"), other); });
    expect_bitwise_equal(other.parameters()[0].detach(), before);
    EXPECT_THAT(message, AllOf(StartsWith("load: " + in("a")), HasSubstr("nothing was loaded")));
    return message;
  };
  EXPECT_THAT(refused(at::zeros({2, 4}), "w", "b"), HasSubstr("w (expected [2, 4], got [2, 3])"));
  EXPECT_THAT(refused(at::zeros({2, 3}, at::kHalf), "w", "b"),
              HasSubstr("w (expected Half, got Float)"));
  EXPECT_THAT(refused(at::zeros({2, 3}), "v", "b"),
              AllOf(HasSubstr("missing: 'v'"), HasSubstr("unexpected: 'w'")));
  EXPECT_THAT(refused(at::zeros({2, 3}), "w", "c"),
              AllOf(HasSubstr("missing: 'c'"), HasSubstr("unexpected: 'b'")));
  SmallNet partly(at::zeros({2, 3}), "w", "c");
  EXPECT_EQ(load(in("a"), partly, {.strict = false}).at("step"), "1");
  expect_bitwise_equal(partly.parameters()[0].detach(), at::ones({2, 3}));
}

TEST_F(SerializeErrors, OptimizersThatDoNotFit) {
  optim::AdamW adamw(net_.parameters());
  save(in("plain"), net_);
  EXPECT_THAT(message_of([&] { load(in("plain"), net_, adamw); }), HasSubstr("saved without"));
  save(in("adamw"), net_, adamw);
  optim::SGD sgd(net_.parameters());
  EXPECT_THAT(
      message_of([&] { load(in("adamw"), net_, sgd); }),
      AllOf(HasSubstr(in("adamw")), HasSubstr("expected the state of SGD, got that of AdamW")));
  torch::optim::LBFGS unknown(net_.parameters());
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { load(in("adamw"), net_, unknown); }),
              HasSubstr("load: expected an optimizer of tessera::optim"));
}

TEST_F(SerializeErrors, NoCheckpointThere) {
  EXPECT_THAT(message_of([&] { load(in("none"), net_); }),
              AllOf(StartsWith("load: " + in("none")), HasSubstr("got nothing")));
  fs::create_directories(in("empty"));
  EXPECT_THAT(message_of([&] { load(in("empty"), net_); }), HasSubstr("without an index.json"));
  EXPECT_THAT(message_of([&] { read_checkpoint_index(in("empty")); }),
              StartsWith("read_checkpoint_index: "));
  EXPECT_THAT(message_of([&] { verify_checkpoint(in("empty")); }),
              StartsWith("verify_checkpoint: "));
}

TEST_F(SerializeErrors, SafetensorsFiles) {
  EXPECT_THAT(message_of([&] { write_safetensors(in("a"), {{"w", at::Tensor()}}); }),
              AllOf(HasSubstr("an undefined one"), HasSubstr("'w'")));
  EXPECT_THAT(message_of([&] { write_safetensors(folder_.path().string(), {}); }),
              HasSubstr("got a folder"));
  EXPECT_THAT(message_of<c10::NotImplementedError>(
                  [&] { write_safetensors(in("a"), {{"w", at::ones({1}, at::kComplexDouble)}}); }),
              HasSubstr("ComplexDouble"));
  EXPECT_THAT(message_of<c10::Error>([&] { write_safetensors("/proc/none/a", {}); }),
              HasSubstr("could not create it"));
  EXPECT_THAT(message_of([&] { import_safetensors(in("none"), net_); }),
              AllOf(StartsWith("import_safetensors: " + in("none")), HasSubstr("No such file")));
  run_threads(2, [&] {
    EXPECT_THAT(message_of<c10::Error>([&] { export_safetensors("/proc/none/a", net_); }),
                StartsWith("export_safetensors: rank 0: "));
    const auto distributed = dtensor::ones({4}, DeviceMesh(torch::kCPU, {0, 1}));
    EXPECT_THAT(message_of([&] { write_safetensors(in("a"), {{"w", distributed}}); }),
                HasSubstr("a distributed one"));
  });
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

}  // namespace
}  // namespace tessera::testing
