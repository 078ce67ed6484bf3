/* Fused steps of float32 on registers alone: what no product of this CPU can pass. */
#include <omp.h>

#if defined(__AVX512F__)
enum { LANES = 16, CHAINS = 24 };
#elif defined(__AVX2__)
enum { LANES = 8, CHAINS = 12 };
#elif defined(__aarch64__)
enum { LANES = 4, CHAINS = 24 };
#else
enum { LANES = 4, CHAINS = 12 };
#endif
typedef float vf __attribute__((vector_size(4 * LANES)));

/* `steps` of every chain on each of `threads`: chains enough not to wait for one another. They begin at multiples of
 * `first`, so that no two are one to the compiler. Returns the FLOP. */
double fused_steps(long steps, int threads, float first) {
    double total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        vf s[CHAINS], factor = {0}, term = {0};
        factor += 0.5f, term += first;
        for (int i = 0; i < CHAINS; i++) s[i] = term * (float)i;
        for (long n = 0; n < steps; n++)
#pragma GCC unroll 24
            for (int i = 0; i < CHAINS; i++) s[i] = s[i] * factor + term;
        for (int i = 0; i < CHAINS; i++) total += (double)s[i][0];
    }
    volatile double kept = total;
    (void)kept;
    return 2.0 * (double)steps * LANES * CHAINS * threads;
}
