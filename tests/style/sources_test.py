"""check_sources finds instructions of one processor that no guard keeps from others."""

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


if __name__ == "__main__":
    unittest.main()
