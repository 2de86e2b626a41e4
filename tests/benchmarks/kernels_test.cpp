// The list of kernels of both sides of `tessera bench train --kernels`.
#include "train_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::benchmarks {
namespace {

using ::testing::HasSubstr;

TEST(KernelNames, LoseWhatDoesNotTellThemApart) {
  EXPECT_EQ(
      short_kernel_name("void at::native::vectorized_elementwise_kernel<4, "
                        "at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> "
                        ">(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, "
                        "3ul>)"),
      "vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>, array<char*, 3ul>>");
  EXPECT_EQ(
      short_kernel_name("void at::native::(anonymous namespace)::layer_norm_kernel<float>(int, "
                        "at::native::(anonymous namespace)::Welford*)"),
      "layer_norm_kernel<float>");
  EXPECT_EQ(short_kernel_name("nvjet_tst_128x256_64x4_2x1_v_bz_TNT"),
            "nvjet_tst_128x256_64x4_2x1_v_bz_TNT");
  EXPECT_EQ(short_kernel_name("Memcpy HtoD (Pinned -> Device)"), "Memcpy HtoD (Pinned -> Device)");
  EXPECT_LE(short_kernel_name(std::string(5000, 'k')).size(), 110);
}

TEST(KernelTable, HasEqualOnesBesideEachOtherAndExtraOnesFirst) {
  const auto table = kernel_table({{"gemm", 900}, {"gemm", 1100, 1000}, {"cast", 10, 2200}},
                                  {{"gemm", 1000}, {"gemm", 1000}, {"fill", 5}}, "pytorch");
  EXPECT_THAT(table, HasSubstr("      2     2.000        2     2.000  gemm\n"));
  EXPECT_THAT(table, HasSubstr("      1     0.010        0     0.000  cast\n"));
  EXPECT_THAT(table, HasSubstr("      0     0.000        1     0.005  fill\n"));
  EXPECT_THAT(table, HasSubstr("      3     2.010        3     2.005  all\n"));
  EXPECT_THAT(table,
              HasSubstr("      1     2.210        1     1.000  from the first to the last\n"));
  EXPECT_LT(table.find("fill"), table.find("gemm"));
}

}  // namespace
}  // namespace tessera::benchmarks
