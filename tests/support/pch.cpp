// Gives the library that carries the precompiled header something to compile.
