// A product of ggml for one row of x, called as often as asked:
//   ggml BYTES K CALLS       bytes of a row of W
// MM_PRODUCT names the function; MM_REPACKED: one of rows that lie packed together.
#include <stdlib.h>

#ifdef MM_REPACKED
void MM_PRODUCT(int k, float* y, size_t, const void* w, const void* x, int x_rows, int rows);
#else
void MM_PRODUCT(int k, float* y, size_t, const void* w, size_t, const void* x, size_t, int x_rows);
#endif

int main(int argc, char** argv) {
  (void)argc;
  const int bytes = atoi(argv[1]), k = atoi(argv[2]), calls = atoi(argv[3]);
  const char* w = calloc(MM_ROWS, bytes);
  const char* x = calloc(2, k);
  float y[MM_ROWS];
  for (int i = 0; i < calls; ++i) {
#ifdef MM_REPACKED
    MM_PRODUCT(k, y, MM_ROWS, w, x, 1, MM_ROWS);
#else
    for (int r = 0; r < MM_ROWS; ++r) MM_PRODUCT(k, y + r, 0, w + r * bytes, 0, x, 0, 1);
#endif
  }
  return 0;
}
