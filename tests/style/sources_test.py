"""check_sources finds instructions of one processor that no guard keeps from others, and words that are not the field's."""

import unittest

import check_sources


class Unguarded(unittest.TestCase):
    def lines(self, text):
        return list(check_sources.unguarded(text.splitlines()))

    def test_what_is_guarded_is_right(self):
        for guard in ("#if defined(__x86_64__)", "#if defined(__SSE2__)", "#if FAST\n#elif defined(__x86_64__)"):
            self.assertEqual(self.lines(f"{guard}\n#if A\n#endif\n  _mm_sfence();\n#else\n  twin();\n#endif\n"), [])
        self.assertEqual(self.lines("// as _mm_sfence() does\n__builtin_popcount(1);\n"), [])

    def test_what_is_not_is_found(self):
        for line in ("#include <immintrin.h>", "_mm256_store_si256(a, b);", "__builtin_ia32_pause();", "__m128i x;",
                     '__builtin_cpu_supports("avx2");', "_cvtsh_ss(x);"):
            self.assertEqual(self.lines(line), [1], line)
            self.assertEqual(self.lines(f"#if defined(__x86_64__)\n#else\n{line}\n#endif\n"), [3], line)
            self.assertEqual(self.lines(f"#if defined(__x86_64__)\n#endif\n{line}\n"), [3], line)


class Glossed(unittest.TestCase):
    def words(self, line):
        return [word for _, word, _ in check_sources.glossed(["", line])]

    def test_words_of_before_are_found(self):
        for line, word in (("the step runs as it is.", "runs as it is"), ("these two run as they are |", "run as they are"),
                           ("class TwoFacedTensor {", "TwoFacedTensor"), ("  Wish wish_;", "Wish"),
                           ("std::vector<Bystander> bystanders_;", "Bystander"), ("Speaker& speaker_;", "Speaker"),
                           ("  const LentInputs lent{};", "LentInputs"), ("turn_gradients_around(values);", "turn_gradients_around"),
                           ("/// Asked by the lookout.", "lookout"), ("  unit.show_whole();", "show_whole")):
            self.assertIn(word, self.words(line), line)

    def test_the_line_and_the_remedy_are_told(self):
        self.assertEqual(list(check_sources.glossed(["", "  Fates fates;"])),
                         [(2, "Fates", "first definition, lifetime"), (2, "fates", "first definition, lifetime")])

    def test_plain_english_stays(self):
        for line in ("reduced together", "as wished", "it tells the story", "every engine runs as it does on several",
                     "Results stay as they are.", "the surface", "no trial in vain", "a passage of text", "has_value"):
            self.assertEqual(self.words(line), [], line)

    def test_every_row_is_in_the_glossary_for_people(self):
        text = (check_sources.ROOT / "CONTRIBUTING.md").read_text()
        for _, say in check_sources.GLOSSARY:
            self.assertIn(f"| {say} |", text)


if __name__ == "__main__":
    unittest.main()
