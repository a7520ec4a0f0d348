// portable_list.h - not a compiler: `-E -DGLM53_LIST` turns every kernel into one line that hipsrc/manifest.py reads, whatever macro made it.
#pragma once
#define KERNEL(name, args_type, threads) GLM53_KERNEL_LINE(name, args_type, threads, 0)
#define SPIN_KERNEL(name, args_type, threads) GLM53_KERNEL_LINE(name, args_type, threads, 1)
#define EARLY_KERNEL(name, args_type, threads, blocks) KERNEL(name, args_type, threads)
#define LDS_KERNEL(name, args_type, threads, blocks, bytes) EARLY_KERNEL(name, args_type, threads, blocks)
