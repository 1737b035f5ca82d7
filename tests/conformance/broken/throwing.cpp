// The misbehaving plugin as C++, which can throw.
#include "misbehaving.c"
