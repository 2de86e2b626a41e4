// Only carries the precompiled header of the library.
