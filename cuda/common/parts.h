// A file of many kernels can be compiled in parts, beside one another. Each has the instantiations that bear its number,
// and the first also what is no template. generate_table.py counts a file's parts by the names below that stand in it; a
// part is compiled with TILERANK_PART as its number, and without it everything is made at once.
//
//     TILERANK_PART_0 template tilerank_status launch<__half>(const Plan& plan);
//     TILERANK_PART_1 template tilerank_status launch<__nv_bfloat16>(const Plan& plan);
//     #if TILERANK_FIRST_PART
//     (functions that call both)
//     #endif
#pragma once

#if !defined(TILERANK_PART) || TILERANK_PART == 0
#define TILERANK_FIRST_PART 1
#define TILERANK_PART_0
#else
#define TILERANK_FIRST_PART 0
#define TILERANK_PART_0 extern
#endif
#if !defined(TILERANK_PART) || TILERANK_PART == 1
#define TILERANK_PART_1
#else
#define TILERANK_PART_1 extern
#endif
#if !defined(TILERANK_PART) || TILERANK_PART == 2
#define TILERANK_PART_2
#else
#define TILERANK_PART_2 extern
#endif
#if !defined(TILERANK_PART) || TILERANK_PART == 3
#define TILERANK_PART_3
#else
#define TILERANK_PART_3 extern
#endif
