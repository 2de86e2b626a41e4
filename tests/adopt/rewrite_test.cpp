// Before and after: what `tessera adopt` writes.
#include "adopt/adopted.h"
#include "adopt/names.h"

#include <gtest/gtest.h>

using tessera::adopt::module_names;
using tessera::test::adopted;

namespace {

void expect_unchanged(const std::string& text) { EXPECT_EQ(adopted(text), text); }

}  // namespace

TEST(AdoptRewrite, KnowsTheClassesOfThePublicHeaders) {
  EXPECT_GT(module_names().size(), 125U);
  for (const char* name : {"Linear", "Sequential", "ModuleList", "Embedding", "ParameterDict"})
    EXPECT_TRUE(module_names().contains(name)) << name;
  for (const char* name : {"RMSNorm", "Module", "AnyModule", "Name", "LinearImpl"})
    EXPECT_FALSE(module_names().contains(name)) << name;
}

TEST(AdoptRewrite, MembersAndConstructions) {
  EXPECT_EQ(adopted("torch::nn::Linear up{nullptr}; auto x = torch::nn::Linear(2, 3);\n"
                    "::torch::nn::ReLU a; std::vector<torch::nn::Conv2d> b; torch :: nn::GRU c;"),
            "tessera::nn::Linear up{nullptr}; auto x = tessera::nn::Linear(2, 3);\n"
            "::tessera::nn::ReLU a; std::vector<tessera::nn::Conv2d> b; tessera :: nn::GRU c;");
  EXPECT_EQ(adopted("void f(const torch::nn::Sequential& s, torch::nn::Embedding::Impl* e);"),
            "void f(const tessera::nn::Sequential& s, tessera::nn::Embedding::Impl* e);");
  EXPECT_EQ(adopted("auto e = torch::nn::Embedding::from_pretrained(w);"),
            "auto e = tessera::nn::Embedding::from_pretrained(w);");
}

TEST(AdoptRewrite, WhatTesseraDoesNotHaveStays) {
  expect_unchanged(
      "struct AImpl : torch::nn::Module { torch::nn::AnyModule any; };\n"
      "auto o = torch::nn::LinearOptions(1, 2); torch::nn::functional::relu(x);\n"
      "torch::nn::init::zeros_(w); torch::nn::Cloneable<A>* c; torch::nn::utils::clip(x);\n"
      "struct MyImpl : torch::nn::LinearImpl {}; torch::nn::Frobnicate f; my::nn::Linear g;\n"
      "object.torch::nn::Linear; at::nn::Linear; torch::nnx::Linear l; xtorch::nn::Linear m;");
}

TEST(AdoptRewrite, CommentsStringsAndDirectivesAreNeverTouched) {
  expect_unchanged(
      "// torch::nn::Linear a\n/* TORCH_MODULE(A) */\n"
      "auto s = \"torch::nn::Linear\"; auto r = R\"(TORCH_MODULE(A);\ntorch::nn::Linear)\";\n"
      "#define LAYER torch::nn::Linear\n#define HOLD(x) \\\n  TORCH_MODULE(x)\n"
      "#if 0\ntorch::nn::Linear dead;\n#endif\n");
  EXPECT_EQ(adopted("torch::nn::Linear a; // torch::nn::Linear\n"),
            "tessera::nn::Linear a; // torch::nn::Linear\n");
}

TEST(AdoptRewrite, Macros) {
  EXPECT_EQ(adopted("struct AImpl : torch::nn::Module { int forward(int); };\nTORCH_MODULE(A);"),
            "struct AImpl : torch::nn::Module { int forward(int); };\nTESSERA_MODULE(A);");
  EXPECT_EQ(adopted("TORCH_MODULE_IMPL(A, AImpl);"), "TESSERA_MODULE(A);");
  EXPECT_EQ(adopted("TORCH_MODULE_IMPL(A,  // the class\n  AImpl);"),
            "TESSERA_MODULE(A  // the class\n  );");
  expect_unchanged("TORCH_MODULE_IMPL(A, Other<int>);");
  EXPECT_EQ(adopted("REGISTER(torch::nn::Linear, 3)"), "REGISTER(tessera::nn::Linear, 3)");
}

TEST(AdoptRewrite, AliasesOfTheNamespace) {
  EXPECT_EQ(adopted("namespace nn = torch::nn;\nnn::Linear a(nn::LinearOptions(1, 2));\n"
                    "auto y = nn::functional::relu(x); struct B : nn::Module {};"),
            "namespace nn = torch::nn;\ntessera::nn::Linear a(nn::LinearOptions(1, 2));\n"
            "auto y = nn::functional::relu(x); struct B : nn::Module {};");
  EXPECT_EQ(
      adopted("namespace t = torch; namespace layers = t::nn; layers::GELU g; t::nn::SELU s;"),
      "namespace t = torch; namespace layers = t::nn; tessera::nn::GELU g; "
      "tessera::nn::SELU s;");
  EXPECT_EQ(adopted("namespace app { namespace nn = torch::nn; nn::Linear a; }\napp::nn::Linear b;"
                    "\nnn::Linear c;"),
            "namespace app { namespace nn = torch::nn; tessera::nn::Linear a; }\n"
            "tessera::nn::Linear b;\nnn::Linear c;");
  EXPECT_EQ(
      adopted("void f() { namespace n = torch::nn; n::Linear a; }\nvoid g() { n::Linear b; }"),
      "void f() { namespace n = torch::nn; tessera::nn::Linear a; }\n"
      "void g() { n::Linear b; }");
  expect_unchanged("namespace nn = my::layers; nn::Linear a;");
  expect_unchanged("namespace nn { class Linear; }\nnn::Linear a;");
}

TEST(AdoptRewrite, UsingNamespaceTorch) {
  EXPECT_EQ(adopted("using namespace torch;\nnn::Linear a; Tensor x; nn::Module m;"),
            "using namespace torch;\ntessera::nn::Linear a; Tensor x; nn::Module m;");
  EXPECT_EQ(adopted("void f() { using namespace torch; nn::Linear a; }\nvoid g(nn::Linear b);"),
            "void f() { using namespace torch; tessera::nn::Linear a; }\nvoid g(nn::Linear b);");
  EXPECT_EQ(adopted("namespace a { using namespace torch; }\nusing namespace a; nn::Linear b;"),
            "namespace a { using namespace torch; }\nusing namespace a; tessera::nn::Linear b;");
}

TEST(AdoptRewrite, UsingNamespaceTorchNn) {
  EXPECT_EQ(
      adopted("using namespace torch::nn;\nLinear a{nullptr}; auto b = Linear(LinearOptions(1, "
              "2)); f(Conv2d(3)); x.Linear(); y->Linear; Q::Linear z; return ReLU();"),
      "using namespace torch::nn;\ntessera::nn::Linear a{nullptr}; auto b = "
      "tessera::nn::Linear(LinearOptions(1, 2)); f(tessera::nn::Conv2d(3)); x.Linear(); "
      "y->Linear; Q::Linear z; return tessera::nn::ReLU();");
  EXPECT_EQ(adopted("namespace torch::nn { struct AImpl : Module { Linear up; }; }"),
            "namespace torch::nn { struct AImpl : Module { tessera::nn::Linear up; }; }");
}

TEST(AdoptRewrite, NamesOfTheProgramsOwnStay) {
  const std::string start = "using namespace torch::nn;\n";
  for (const char* own :
       {"struct Linear {};", "TESSERA_MODULE(Linear);", "Tensor Linear(Tensor x);",
        "enum Kind { Linear, Other };", "#define Linear 3\n", "auto& Linear = y;"})
    expect_unchanged(start + own + " g(Linear);");
  EXPECT_EQ(
      adopted(start + "enum class Kind { Linear, ReLU }; g(Kind::Linear, Linear(1, 2));"),
      start + "enum class Kind { Linear, ReLU }; g(Kind::Linear, tessera::nn::Linear(1, 2));");
}

TEST(AdoptRewrite, UsingDeclarations) {
  EXPECT_EQ(adopted("using torch::nn::Linear;\nusing torch::nn::LinearOptions;\nLinear a;"),
            "using tessera::nn::Linear;\nusing torch::nn::LinearOptions;\nLinear a;");
  EXPECT_EQ(adopted("using Layer = torch::nn::Linear; typedef torch::nn::GRU Gru; Layer a;"),
            "using Layer = tessera::nn::Linear; typedef tessera::nn::GRU Gru; Layer a;");
}

TEST(AdoptRewrite, CastsFindModulesOfBothLibraries) {
  expect_unchanged("if (auto* l = module.as<torch::nn::Linear>()) {}");
  expect_unchanged("using namespace torch; m->as<nn::Linear>();");
  EXPECT_EQ(adopted("using torch::nn::Linear; m.as<Linear>();"),
            "using tessera::nn::Linear; m.as<torch::nn::Linear>();");
  EXPECT_EQ(adopted("using L = torch::nn::Linear; m.as<L>();"),
            "using L = tessera::nn::Linear; m.as<torch::nn::Linear>();");
}

TEST(AdoptRewrite, ExactTypesBecomeThoseOfTheHolders) {
  EXPECT_EQ(adopted("s->at<torch::nn::LinearImpl>(0); any.get<torch::nn::Linear>();"),
            "s->at<tessera::nn::Linear::Impl>(0); any.get<tessera::nn::Linear>();");
  EXPECT_EQ(adopted("namespace nn = torch::nn; std::make_shared<nn::ReLUImpl>();"),
            "namespace nn = torch::nn; std::make_shared<tessera::nn::ReLU::Impl>();");
  EXPECT_EQ(adopted("using namespace torch::nn; s->at<LinearImpl>(0);"),
            "using namespace torch::nn; s->at<tessera::nn::Linear::Impl>(0);");
  const std::string before = "struct AImpl { int forward(int); A b() { m<AImpl>(); } };\n";
  EXPECT_EQ(adopted(before + "TORCH_MODULE(A);\ns->at<AImpl>(0); std::make_shared<x::AImpl>();"),
            before + "TESSERA_MODULE(A);\ns->at<A::Impl>(0); std::make_shared<x::A::Impl>();");
  // Before the holder is declared, and where it stays torch's, the class is all there is.
  expect_unchanged(
      "struct AImpl { A f() { return std::make_shared<AImpl>(); } int forward(int); };\n");
  expect_unchanged("struct AImpl final { int forward(int); };\nTORCH_MODULE(A);\ns->at<AImpl>(0);");
}

TEST(AdoptRewrite, BothSidesOfConditions) {
  EXPECT_EQ(
      adopted(
          "#ifdef X\nnamespace a {\n#else\nnamespace b {\n#endif\nnamespace nn = torch::nn;\n"
          "#if Y\nstruct S {\n#else\nstruct S : T {\n#endif\nnn::Linear l; }; }\nnn::Linear m;"),
      "#ifdef X\nnamespace a {\n#else\nnamespace b {\n#endif\nnamespace nn = torch::nn;\n"
      "#if Y\nstruct S {\n#else\nstruct S : T {\n#endif\ntessera::nn::Linear l; }; }\n"
      "nn::Linear m;");
}

TEST(AdoptRewrite, KeepsBytes) {
  EXPECT_EQ(adopted("// \xe9\r\ntorch::nn::Linear a;\r\n\t\"\xff\""),
            "// \xe9\r\ntessera::nn::Linear a;\r\n\t\"\xff\"");
}
