/* The code of an Apple GPU (G13, G14) of an OpenCL kernel in SPIR-V, by Mesa's compiler:
 *   mmagx FILE.spv KERNEL THREADS HOIST FUSE
 * HOIST 1: what does not change in a loop moves out of it; 0: it stays, which takes fewer registers.
 * FUSE 1: a product and a sum become one fma, which fast math allows the text of other projects.
 * with AGX_MESA_DEBUG=shaders,shaderdb in the environment, which makes Mesa print code and counts.
 * build_mesa.py compiles it.
 */
#include "asahi/compiler/agx_compile.h"
#include "asahi/compiler/agx_nir.h"
#include "compiler/glsl_types.h"
#include "compiler/spirv/nir_spirv.h"
#include "nir.h"
#include "nir_builder.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void optimise(nir_shader *s)
{
   bool progress;
   do {
      progress = false;
      NIR_PASS(progress, s, nir_split_var_copies);
      NIR_PASS(progress, s, nir_split_struct_vars, nir_var_function_temp);
      NIR_PASS(progress, s, nir_lower_var_copies);
      NIR_PASS(progress, s, nir_lower_vars_to_ssa);
      NIR_PASS(progress, s, nir_copy_prop);
      NIR_PASS(progress, s, nir_opt_remove_phis);
      NIR_PASS(progress, s, nir_lower_phis_to_scalar, true);
      NIR_PASS(progress, s, nir_opt_dce);
      NIR_PASS(progress, s, nir_opt_dead_cf);
      NIR_PASS(progress, s, nir_opt_cse);
      NIR_PASS(progress, s, nir_opt_peephole_select, 64, false, true);
      NIR_PASS(progress, s, nir_opt_algebraic);
      NIR_PASS(progress, s, nir_opt_constant_folding);
      NIR_PASS(progress, s, nir_opt_deref);
      NIR_PASS(progress, s, nir_opt_copy_prop_vars);
      NIR_PASS(progress, s, nir_opt_undef);
      NIR_PASS(progress, s, nir_lower_undef_to_zero);
      NIR_PASS(progress, s, nir_opt_shrink_vectors, true);
   } while (progress);
}

/* Arguments lie in uniform registers, as Apple's driver and Asahi's put them. */
static bool lower_input(nir_builder *b, nir_intrinsic_instr *i, void *data)
{
   if (i->intrinsic == nir_intrinsic_load_kernel_input) {
      unsigned at = nir_intrinsic_base(i);
      if (!nir_src_is_const(i->src[0])) {
         fprintf(stderr, "an argument with an index\n");
         exit(3);
      }
      at += nir_src_as_uint(i->src[0]);
      b->cursor = nir_before_instr(&i->instr);
      nir_def_replace(&i->def, nir_load_preamble(b, i->def.num_components, i->def.bit_size,
                                                 .base = at / 2));
      return true;
   }
   /* Tables lie in memory; their address is one more argument. */
   if (i->intrinsic == nir_intrinsic_load_constant_base_ptr) {
      b->cursor = nir_before_instr(&i->instr);
      nir_def_replace(&i->def, nir_load_preamble(b, 1, 64, .base = *(unsigned *)data / 2));
      return true;
   }
   /* No base of the grid. */
   if (i->intrinsic == nir_intrinsic_load_base_workgroup_id ||
       i->intrinsic == nir_intrinsic_load_base_global_invocation_id) {
      b->cursor = nir_before_instr(&i->instr);
      nir_def_replace(&i->def, nir_imm_zero(b, i->def.num_components, i->def.bit_size));
      return true;
   }
   return false;
}

/* The lower half of a sum or a product of 64 bits needs the lower halves alone: addresses in
 * threadgroup memory, which SPIR-V has with 64 bits and the machine with 16. */
static bool narrow(nir_builder *b, nir_alu_instr *alu, void *data)
{
   if (alu->op != nir_op_u2u32 && alu->op != nir_op_i2i32 &&
       alu->op != nir_op_unpack_64_2x32_split_x)
      return false;
   nir_alu_instr *wide = nir_src_as_alu_instr(alu->src[0].src);
   if (!wide || wide->def.bit_size != 64)
      return false;
   nir_op op = wide->op == nir_op_amul ? nir_op_imul : wide->op;
   if (op != nir_op_iadd && op != nir_op_imul && op != nir_op_ishl)
      return false;
   b->cursor = nir_before_instr(&alu->instr);
   nir_def *first = nir_u2u32(b, nir_ssa_for_alu_src(b, wide, 0));
   nir_def *second = nir_ssa_for_alu_src(b, wide, 1);
   if (op != nir_op_ishl)
      second = nir_u2u32(b, second);
   nir_def_replace(&alu->def, nir_build_alu2(b, op, first, second));
   return true;
}

static bool allow_fusion(nir_builder *b, nir_alu_instr *alu, void *data)
{
   alu->exact = false;
   return true;
}

static void *read_file(const char *name, size_t *size)
{
   FILE *f = fopen(name, "rb");
   if (!f) { perror(name); exit(2); }
   fseek(f, 0, SEEK_END);
   *size = ftell(f);
   rewind(f);
   void *p = malloc(*size);
   if (fread(p, 1, *size, f) != *size) exit(2);
   fclose(f);
   return p;
}

int main(int argc, char **argv)
{
   if (argc < 6)
      return 2;
   size_t size;
   uint32_t *words = read_file(argv[1], &size);
   glsl_type_singleton_init_or_ref();

   const struct spirv_to_nir_options options = {
      .environment = NIR_SPIRV_OPENCL,
      .shared_addr_format = nir_address_format_62bit_generic,
      .global_addr_format = nir_address_format_62bit_generic,
      .temp_addr_format = nir_address_format_62bit_generic,
      .constant_addr_format = nir_address_format_64bit_global,
   };
   nir_shader *s = spirv_to_nir(words, size / 4, NULL, 0, MESA_SHADER_KERNEL, argv[2], &options,
                                &agx_nir_options);
   if (!s) { fprintf(stderr, "spirv_to_nir failed\n"); return 3; }
   nir_validate_shader(s, "after spirv_to_nir");
   s->info.workgroup_size[0] = atoi(argv[3]);
   s->info.workgroup_size[1] = s->info.workgroup_size[2] = 1;
   s->info.workgroup_size_variable = false;

   NIR_PASS(_, s, nir_lower_variable_initializers, nir_var_function_temp);
   NIR_PASS(_, s, nir_lower_returns);
   NIR_PASS(_, s, nir_inline_functions);
   nir_remove_non_entrypoints(s);
   NIR_PASS(_, s, nir_copy_prop);
   NIR_PASS(_, s, nir_opt_deref);
   NIR_PASS(_, s, nir_lower_variable_initializers, ~nir_var_mem_constant);
   NIR_PASS(_, s, nir_lower_system_values);
   NIR_PASS(_, s, nir_lower_vec3_to_vec4,
            nir_var_shader_temp | nir_var_function_temp | nir_var_mem_shared |
               nir_var_mem_global | nir_var_mem_constant);
   NIR_PASS(_, s, nir_lower_vars_to_explicit_types,
            nir_var_uniform | nir_var_shader_temp | nir_var_function_temp | nir_var_mem_global,
            glsl_get_cl_type_size_align);
   optimise(s);
   NIR_PASS(_, s, nir_remove_dead_variables, nir_var_all & ~nir_var_uniform, NULL);
   NIR_PASS(_, s, nir_lower_vars_to_explicit_types,
            nir_var_shader_temp | nir_var_function_temp | nir_var_mem_shared |
               nir_var_mem_global | nir_var_mem_constant,
            glsl_get_cl_type_size_align);
   NIR_PASS(_, s, nir_lower_memcpy);
   unsigned inputs = s->num_uniforms;
   NIR_PASS(_, s, nir_lower_explicit_io, nir_var_mem_constant, nir_address_format_64bit_global);
   NIR_PASS(_, s, nir_lower_explicit_io, nir_var_uniform,
            nir_address_format_32bit_offset_as_64bit);
   s->info.stage = MESA_SHADER_COMPUTE;
   nir_lower_compute_system_values_options cs = {.global_id_is_32bit = true};
   NIR_PASS(_, s, nir_lower_compute_system_values, &cs);
   NIR_PASS(_, s, nir_lower_convert_alu_types, NULL);
   NIR_PASS(_, s, nir_opt_if, 0);
   NIR_PASS(_, s, nir_opt_idiv_const, 16);
   optimise(s);
   NIR_PASS(_, s, nir_lower_explicit_io, nir_var_mem_shared, nir_address_format_62bit_generic);
   bool progress;
   do {
      progress = false;
      NIR_PASS(progress, s, nir_shader_alu_pass, narrow, nir_metadata_control_flow, NULL);
      optimise(s);
   } while (progress);
   /* A load of threadgroup memory adds a constant to its address: no instruction, no register. */
   const nir_opt_offsets_options offsets = {.shared_max = 0xFFFF, .allow_offset_wrap = true};
   NIR_PASS(_, s, nir_opt_offsets, &offsets);
   NIR_PASS(_, s, nir_shader_intrinsics_pass, lower_input, nir_metadata_control_flow, &inputs);
   /* Addresses as arithmetic, and what does not change out of the loops: Mesa's driver leaves the
    * address of every load where the load is; Apple's compiler is LLVM, which does not. */
   NIR_PASS(_, s, nir_lower_explicit_io, nir_var_mem_global, nir_address_format_62bit_generic);
   optimise(s);
   if (atoi(argv[4]))
      NIR_PASS(_, s, nir_opt_licm);
   if (atoi(argv[5]))
      NIR_PASS(_, s, nir_shader_alu_pass, allow_fusion, nir_metadata_all, NULL);
   optimise(s);
   do {
      progress = false;
      NIR_PASS(progress, s, nir_opt_loop);
   } while (progress);

   nir_shader *empty = nir_shader_create(NULL, MESA_SHADER_COMPUTE, &agx_nir_options, NULL);
   agx_preprocess_nir(s, empty);
   struct agx_shader_key key = {
      .libagx = empty,
      .promote_constants = true,
      .has_scratch = true,
      .reserved_preamble = (inputs ? inputs : 160) / 2 + 8,
      .dev.needs_g13x_coherency = U_TRISTATE_NO,
   };
   struct agx_shader_part out;
   agx_compile_shader_nir(s, &key, NULL, &out);
   printf("RESULT bytes=%u main=%u regs=%u preamble_regs=%u uniforms=%u scratch=%u "
          "local=%u threads=%u\n",
          out.info.binary_size, out.info.main_size, out.info.nr_gprs,
          out.info.nr_preamble_gprs, out.info.push_count, out.info.scratch_size,
          out.info.local_size, agx_occupancy_for_register_count(out.info.nr_gprs).max_threads);
   return 0;
}
