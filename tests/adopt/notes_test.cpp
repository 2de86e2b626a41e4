// What is left, and why.
#include "adopt/adopted.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

using tessera::test::adopt_files;
using tessera::test::left;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace {

/// A module AImpl with this class head and body, and its holder.
std::string with_holder(const std::string& head, const std::string& body) {
  return head + " { " + body + " };\nTORCH_MODULE(A);\n";
}

const std::string kHead = "struct AImpl : torch::nn::Module";

}  // namespace

TEST(AdoptNotes, WhatStaysIsToldOncePerReason) {
  const auto stays = adopt_files({{"a.cpp",
                                   "torch::nn::LinearOptions a;\ntorch::nn::LinearOptions b;\n"
                                   "torch::nn::GRUOptions c;\ntorch::nn::functional::relu(x);\n"
                                   "torch::nn::AnyModule d;\nm.as<torch::nn::Linear>();\n"}})
                         .stays;
  EXPECT_THAT(stays,
              ElementsAre(HasSubstr("1 torch::nn::LinearOptions, torch::nn::GRUOptions: opt"),
                          HasSubstr("4 torch::nn::functional::relu: functions"),
                          HasSubstr("5 torch::nn::AnyModule: modules of both"),
                          HasSubstr("6 as<torch::nn::Linear>: finds torch's modules and")));
}

TEST(AdoptNotes, NamesThatTesseraLacks) {
  EXPECT_THAT(left("\ntorch::nn::Frobnicate a;"),
              ElementsAre("2 torch::nn::Frobnicate: tessera::nn has no such name"));
}

TEST(AdoptNotes, Directives) {
  EXPECT_THAT(left("#define A torch::nn::Linear\n#define B(x) TORCH_MODULE(x)\n"),
              ElementsAre(HasSubstr("1 torch::nn::Linear, TORCH_MODULE: in a macro")));
}

TEST(AdoptNotes, ModulesThatCannotBeHooked) {
  EXPECT_THAT(left(with_holder(kHead, "int forward(int);")), IsEmpty());
  EXPECT_THAT(left(with_holder(kHead, "int forward(int); int forward(float);")),
              ElementsAre(HasSubstr("2 TORCH_MODULE(A): AImpl has several functions forward")));
  EXPECT_THAT(left(with_holder(kHead, "template <class T> T forward(T x);")),
              ElementsAre(HasSubstr("AImpl::forward is a template")));
  EXPECT_THAT(left(with_holder("class AImpl : public torch::nn::Module", "int forward(int);")),
              ElementsAre(HasSubstr("AImpl::forward is not public")));
  EXPECT_THAT(left(with_holder(kHead, "Tensor& forward(int);")),
              ElementsAre(HasSubstr("AImpl::forward returns a reference")));
  EXPECT_THAT(left(with_holder("struct AImpl final : torch::nn::Module", "int forward(int);")),
              ElementsAre(HasSubstr("AImpl is final")));
  EXPECT_THAT(left(with_holder(kHead, "int encode(int);")),
              ElementsAre(HasSubstr("AImpl has no forward")));
  EXPECT_THAT(left(with_holder("struct AImpl : torch::nn::SequentialImpl", "int x;")),
              ElementsAre(HasSubstr("AImpl has the forward of Sequential")));
  EXPECT_THAT(left("TORCH_MODULE_IMPL(A, B<int>);"),
              ElementsAre(HasSubstr("write `using AImpl = …; TESSERA_MODULE(A);`")));
}

TEST(AdoptNotes, ModulesThatCanBeHooked) {
  EXPECT_THAT(left(with_holder(kHead, "int f(int x) { return forward(x); } int forward(int);")),
              IsEmpty());
  EXPECT_THAT(
      left(with_holder(kHead, "\n#if X\nint forward(int);\n#else\nint forward(float);\n#endif\n")),
      IsEmpty());
  EXPECT_THAT(left(with_holder("class AImpl : public torch::nn::Module",
                               "int x; public: std::vector<int> forward(int);")),
              IsEmpty());
  EXPECT_THAT(left(with_holder("struct AImpl : BaseImpl", "int x;")), IsEmpty());
}

TEST(AdoptNotes, ModulesWithoutAHolder) {
  EXPECT_THAT(left("struct Net : torch::nn::Module {\n  int forward(int);\n};"),
              ElementsAre(HasSubstr("1 struct Net: a module without a holder, whose calls run no "
                                    "hooks: name it NetImpl and add TESSERA_MODULE(Net)")));
  EXPECT_THAT(left("class AImpl : public torch::nn::Module { public: int forward(int); };"),
              ElementsAre(HasSubstr("class AImpl: a module without a holder, whose calls run no "
                                    "hooks: add TESSERA_MODULE(A)")));
  EXPECT_THAT(left("struct A : torch::nn::ModuleHolder<AImpl> {};"),
              ElementsAre(HasSubstr("1 torch::nn::ModuleHolder: a holder that is written out")));
}

TEST(AdoptNotes, CallsThatPassHooksBy) {
  EXPECT_THAT(
      left(with_holder(kHead, "int forward(int);") + "void f(AImpl& a, std::shared_ptr<AImpl> b);"),
      ElementsAre(HasSubstr("3 AImpl: calls through a reference or pointer")));
  EXPECT_THAT(left("torch::nn::LinearImpl* a;"),
              ElementsAre(HasSubstr("1 torch::nn::LinearImpl: calls through")));
}

TEST(AdoptNotes, NamesThatAreNotClear) {
  EXPECT_THAT(left("using namespace torch::nn;\nstruct Linear {};\nLinear a;"),
              ElementsAre(HasSubstr("3 Linear: the program has something of this name")));
  EXPECT_THAT(left("nn::Linear a;"),
              ElementsAre(HasSubstr("1 nn::Linear: what nn is stands in a")));
  EXPECT_THAT(left("namespace a { namespace b = torch::nn; }\na // here\n  ::b::Linear c;"),
              ElementsAre(HasSubstr("a::b::Linear: its name has a comment or a line's end")));
}

TEST(AdoptNotes, ErrorsNameFileAndLine) {
  const auto adopted =
      adopt_files({{"a.cpp", "\n\"a\n"}, {"b.cpp", "/*"}, {"c.cpp", "torch::nn::GRU a;"}});
  EXPECT_THAT(adopted.errors, ElementsAre("a.cpp:2: a string literal that begins here has no end",
                                          "b.cpp:1: a comment /* that begins here has no end"));
  EXPECT_THAT(adopt_files({{"a.cpp", std::string(600, '{')}}).errors,
              ElementsAre("a.cpp:1: braces are nested too deep"));
}
