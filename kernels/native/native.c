/* One token of an answer, without a call of torch for each small operation.

   No headers but the C library's: compiled on the user's machine (compiling.py), called by
   address (library.py). Each function has a twin in plain torch, which runs where this does not. */

#include "native.h"

#include "products.c"
#include "scan.c"
#include "load.c"
#include "attend.c"
#include "gather.c"
