// Saved checkpoints of models on GPUs: from and to any layout, and from and to the CPU.
#include <tessera/tessera.h>

#include "compose/on_device.h"
#include "state/checkpoint_training.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <optional>

namespace tessera::testing {
namespace {

/// A folder that rank 0 makes and all ranks see.
class FolderOfRanks {
 public:
  FolderOfRanks() {
    if (rank() == 0) own_.emplace();
    path_ = broadcast_bytes(own_ ? own_->path().string() : "");
  }
  ~FolderOfRanks() {
    try {
      barrier();  // nobody reads any more
    } catch (const std::exception&) {
      // Ranks that failed have been told.
    }
  }
  FolderOfRanks(const FolderOfRanks&) = delete;
  FolderOfRanks& operator=(const FolderOfRanks&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::optional<TemporaryFolder> own_;
  std::string path_;
};

Wholes on_host(const Wholes& wholes) {
  Wholes copies;
  for (const auto& [name, tensor] : wholes) copies[name] = tensor.cpu();
  return copies;
}

/// This rank alone: CPU tensors, nobody to talk to.
Group alone() { return new_group({rank()}); }

const Layout kLayouts[] = {Layout::Plain,  Layout::Replicate, Layout::FullyShard,
                           Layout::Hybrid, Layout::TpPacked,  Layout::TpFullyShard};

class SavedOnDevices : public ::testing::TestWithParam<std::tuple<Layout, DeviceCase>> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, SavedOnDevices,
                         ::testing::Combine(::testing::ValuesIn(kLayouts),
                                            ::testing::ValuesIn(cuda_cases())),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) +
                                  ("_" + std::get<1>(info.param).name());
                         });

// Saved on the device, resumed there, and loaded on the CPU by one process; then saved by that and
// resumed on the device.
TEST_P(SavedOnDevices, GoOnWhereTheyWereSavedAndOnTheCpu) {
  const auto& [saved_layout, where] = GetParam();
  run_on(where, [layout = saved_layout] {
    const FolderOfRanks folder;
    auto net = make_checkpoint_net(layout, 11, run_device());
    auto optimizer = make_adamw(net);
    for (int step = 0; step < 2; ++step) train_step(net, optimizer, step);
    save(folder / "device", net, optimizer, {{"rank", std::to_string(rank())}});
    const auto saved = wholes_of(net, optimizer, packed_ranks_of(layout));
    train_step(net, optimizer, 2);
    const auto after = wholes_of(net, optimizer, packed_ranks_of(layout));

    auto resumed = make_checkpoint_net(layout, 99, run_device());
    auto resumed_optimizer = make_adamw(resumed);
    const auto extra = load(folder / "device", resumed, resumed_optimizer);
    EXPECT_EQ(extra.at("rank"), std::to_string(rank()));
    expect_wholes(wholes_of(resumed, resumed_optimizer, packed_ranks_of(layout)), saved, true);
    train_step(resumed, resumed_optimizer, 2);
    expect_wholes(wholes_of(resumed, resumed_optimizer, packed_ranks_of(layout)), after, true);

    auto on_cpu = make_checkpoint_net(Layout::Plain, 98);
    auto cpu_optimizer = make_adamw(on_cpu);
    load(folder / "device", on_cpu, cpu_optimizer, {.group = alone()});
    EXPECT_TRUE(on_cpu->in->weight.is_cpu());
    expect_wholes(wholes_of(on_cpu, cpu_optimizer, 0), on_host(saved), true);
    train_step(on_cpu, cpu_optimizer, 2);
    expect_wholes(wholes_of(on_cpu, cpu_optimizer, 0), on_host(after), false);

    const auto from_cpu = folder / ("cpu-" + std::to_string(rank()));
    save(from_cpu, on_cpu, cpu_optimizer, {}, {.group = alone()});
    barrier();
    auto back = make_checkpoint_net(layout, 97, run_device());
    auto back_optimizer = make_adamw(back);
    load(folder / "cpu-0", back, back_optimizer);
    expect_wholes(wholes_of(back, back_optimizer, packed_ranks_of(layout)), after, false);
    EXPECT_EQ(wholes_of(back, back_optimizer, packed_ranks_of(layout)).at("in.weight").device(),
              run_device());
  });
}

class SavesOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, SavesOnDevices, ::testing::ValuesIn(cuda_cases()), case_name);

TEST_P(SavesOnDevices, AsyncWritesTheValuesOfTheMoment) {
  run_on(GetParam(), [] {
    const FolderOfRanks folder;
    auto net = make_checkpoint_net(Layout::FullyShard, 11, run_device());
    auto optimizer = make_adamw(net);
    std::vector<Wholes> saved;
    PendingSave pending;
    for (int step = 0; step < 3; ++step) {
      train_step(net, optimizer, step);
      saved.push_back(wholes_of(net, optimizer, 0));
      std::optional<BusyStream> late;  // what is queued has not been computed when it is saved
      if (step == 1) late.emplace();
      {
        const at::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.mul_(2);
      }
      pending = save_async(folder / ("step-" + std::to_string(step)), net, optimizer);
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.div_(2);  // the thread writes meanwhile
      expect_bitwise_equal(all_reduce(at::ones({2}, run_device())).cpu(),
                           at::full({2}, static_cast<double>(world_size())), "training goes on");
    }
    pending.wait();
    for (int step = 0; step < 3; ++step) {
      auto loaded = make_checkpoint_net(Layout::FullyShard, 99, run_device());
      auto loaded_optimizer = make_adamw(loaded);
      load(folder / ("step-" + std::to_string(step)), loaded, loaded_optimizer);
      const auto actual = wholes_of(loaded, loaded_optimizer, 0);
      const auto& expected = saved[static_cast<size_t>(step)];
      expect_bitwise_equal(actual.at("qkv.weight"), expected.at("qkv.weight") * 2, "parameter");
      expect_bitwise_equal(actual.at("qkv.weight/exp_avg"), expected.at("qkv.weight/exp_avg"),
                           "state");
    }
  });
}

TEST_P(SavesOnDevices, ResumedTrainingDrawsTheSameNumbers) {
  run_on(GetParam(), [] {
    const FolderOfRanks folder;
    auto net = make_checkpoint_net(Layout::Replicate, 11, run_device());
    auto generator = at::globalContext().defaultGenerator(run_device());
    torch::manual_seed(5 + static_cast<uint64_t>(rank()));
    torch::rand({3}, run_device());
    const auto state = generator.get_state();
    const std::string bytes(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
    save(folder / "a", net, {{"random", bytes}});
    const auto expected = torch::rand({5}, run_device());
    torch::manual_seed(77);
    const auto extra = load(folder / "a", net);
    auto restored = at::empty_like(state);
    ASSERT_EQ(extra.at("random").size(), restored.nbytes());
    std::memcpy(restored.mutable_data_ptr(), extra.at("random").data(), restored.nbytes());
    generator.set_state(restored);
    expect_bitwise_equal(torch::rand({5}, run_device()), expected, "drawn after the save");
  });
}

TEST_P(SavesOnDevices, StateDictsMoveBetweenDevices) {
  run_on(GetParam(), [] {
    auto net = make_checkpoint_net(Layout::FullyShard, 11, run_device());
    auto plain = make_checkpoint_net(Layout::Plain, 99);
    EXPECT_TRUE(load_state_dict(plain, state_dict(net)).empty());
    const auto expected = make_checkpoint_net(Layout::Plain, 11);
    for (const auto& [name, value] : state_dict(plain)) {
      EXPECT_TRUE(value.is_cpu()) << name;
      expect_bitwise_equal(value, state_dict(expected)[name], name);
    }
    const auto other = make_checkpoint_net(Layout::Plain, 50);
    EXPECT_TRUE(load_state_dict(net, state_dict(other)).empty());
    for (const auto& [name, value] : state_dict(net))
      expect_bitwise_equal(value.cpu(), state_dict(other)[name], name);
  });
}

class SaveAheadOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, SaveAheadOnDevices,
                         ::testing::Values(DeviceCase{at::kCUDA, "shm", 1},
                                           DeviceCase{at::kCUDA, "nccl", 2}),
                         case_name);

// Values are copied in the order of the stream; the thread waits for them, the caller does not, nor
// does what it tells the other ranks.
TEST_P(SaveAheadOnDevices, TheCallerDoesNotWaitForTheDevice) {
  run_on(GetParam(), [] {
    const FolderOfRanks folder;
    auto net = make_checkpoint_net(Layout::FullyShard, 11, run_device());
    auto optimizer = make_adamw(net);
    train_step(net, optimizer, 0);
    PendingSave pending;
    int saves = 0;
    EXPECT_TRUE(returns_ahead_of_device([&] {
      pending = save_async(folder / ("step-" + std::to_string(saves++)), net, optimizer);
    }));
    const auto saved = wholes_of(net, optimizer, 0);
    pending.wait();
    auto loaded = make_checkpoint_net(Layout::FullyShard, 99, run_device());
    auto loaded_optimizer = make_adamw(loaded);
    load(folder / ("step-" + std::to_string(saves - 1)), loaded, loaded_optimizer);
    expect_wholes(wholes_of(loaded, loaded_optimizer, 0), saved, true);
  });
}

// The device copies the values for itself first: what training queues next does not wait until they
// are on the host.
TEST(SaveBesideTrainingOnCuda, KernelsOfTheNextStepDoNotWaitForTheHost) {
  run_on({.device = at::kCUDA, .backend = "shm", .ranks = 1}, [] {
    const FolderOfRanks folder;
    constexpr int64_t kElements = int64_t{1} << 27;  // 10 ms and more on their way to the host
    const auto make_net = [&](double value) {
      auto net = std::make_shared<torch::nn::Module>("net");
      net->register_parameter("weight", at::full({kElements}, value, run_device()));
      return net;
    };
    const auto net = make_net(3);
    auto weight = net->parameters()[0].detach();
    const auto host = at::empty({kElements}, at::TensorOptions().pinned_memory(true));
    save_async(folder / "warm-up", net).wait();
    // Milliseconds of the device from here until it has done what is queued after `save`.
    const auto held_up_by = [&](const std::function<void()>& save) {
      const BusyStream busy;  // while the host queues the rest
      c10::Event begin(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
      c10::Event end(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
      begin.record(current_stream());
      save();
      weight.mul_(2);
      end.record(current_stream());
      EXPECT_TRUE(busy.is_running());
      end.synchronize();
      return begin.elapsedTime(end);
    };
    weight.mul_(1);  // a kernel that is used for the first time is loaded, by waiting
    const auto in_order = held_up_by([&] { host.copy_(weight, /*non_blocking=*/true); });
    PendingSave pending;
    const auto beside = held_up_by([&] { pending = save_async(folder / "beside", net); });
    EXPECT_LT(beside, in_order / 2);
    pending.wait();
    const auto loaded = make_net(0);
    load(folder / "beside", loaded);
    EXPECT_TRUE(loaded->parameters()[0].eq(6).all().item<bool>());
  });
}

}  // namespace
}  // namespace tessera::testing
