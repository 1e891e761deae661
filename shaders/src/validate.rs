//! Tests of every composed shader, without a device: naga validates it, its uniform block is compared with the Rust
//! struct, its bindings with the kernel's, and it is translated to MSL, HLSL and SPIR-V.

use crate::kernel::{Access, Encoding, Kernel, Teams};
use crate::params;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module, TypeInner};

/// Every kernel, by subgroups and without.
fn composed() -> impl Iterator<Item = (Kernel, Module, ModuleInfo)> {
    let subgroup = |least, most| Teams::Subgroup { least, most };
    let teams = [Teams::Workgroup, subgroup(8, 64), subgroup(8, 8)];
    let all = Kernel::all().into_iter().flat_map(move |kernel| teams.map(|teams| (kernel, teams)));
    // The same text for both is checked once.
    let differ = |(kernel, teams): &(Kernel, Teams)| {
        *teams == Teams::Workgroup || kernel.source(*teams) != kernel.source(Teams::Workgroup)
    };
    all.filter(differ).map(|(kernel, teams)| {
        let (module, info) = parse(kernel, teams);
        (kernel, module, info)
    })
}

fn parse(kernel: Kernel, teams: Teams) -> (Module, ModuleInfo) {
    let source = kernel.source(teams);
    let name = kernel.name();
    let module = naga::front::wgsl::parse_str(&source)
        .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(&source)));
    // unpack2x16float is missing on OpenGL only, which is not among our backends.
    let everywhere = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let mut capabilities = everywhere;
    capabilities.set(Capabilities::SHADER_FLOAT16, kernel.encoding() == Encoding::F16Native);
    capabilities.set(Capabilities::SUBGROUP, teams != Teams::Workgroup);
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .validate(&module)
        .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(&source)));
    (module, info)
}

fn fields(kernel: Kernel) -> (Vec<(&'static str, usize, &'static str)>, usize) {
    match kernel {
        Kernel::Add | Kernel::Scale | Kernel::Softcap => (params::Add::fields(), size_of::<params::Add>()),
        Kernel::AddBias(_) => (params::AddBias::fields(), size_of::<params::AddBias>()),
        Kernel::Embed(_) => (params::Embed::fields(), size_of::<params::Embed>()),
        Kernel::RmsNorm(_) | Kernel::LayerNorm(_) => (params::Norm::fields(), size_of::<params::Norm>()),
        Kernel::HeadNorm(_) => (params::HeadNorm::fields(), size_of::<params::HeadNorm>()),
        Kernel::Gelu => (params::Gelu::fields(), size_of::<params::Gelu>()),
        Kernel::Matvec(..) | Kernel::MatmulTiled(_) | Kernel::MatmulWide(_) => {
            (params::Matmul::fields(), size_of::<params::Matmul>())
        }
        Kernel::HeadMatvec(..) | Kernel::HeadMatmulTiled(_) => {
            (params::HeadMatmul::fields(), size_of::<params::HeadMatmul>())
        }
        Kernel::LatentQueries | Kernel::LatentAppend(_) => {
            (params::LatentAppend::fields(), size_of::<params::LatentAppend>())
        }
        Kernel::RopeAppend(_) => (params::RopeAppend::fields(), size_of::<params::RopeAppend>()),
        Kernel::Attention(..) | Kernel::AttentionWide(_) | Kernel::AttentionReduce(..) => {
            (params::Attention::fields(), size_of::<params::Attention>())
        }
        Kernel::Merge => (params::Merge::fields(), size_of::<params::Merge>()),
        Kernel::Sink(_) => (params::Sink::fields(), size_of::<params::Sink>()),
        Kernel::Gated(_) => (params::Gated::fields(), size_of::<params::Gated>()),
        Kernel::Route(_) | Kernel::Sort => (params::Route::fields(), size_of::<params::Route>()),
        Kernel::GroupedMatvec(..) | Kernel::GroupedTiled(_) => {
            (params::Grouped::fields(), size_of::<params::Grouped>())
        }
        Kernel::GatherChoices | Kernel::AddBiases(_) | Kernel::Combine => {
            (params::Experts::fields(), size_of::<params::Experts>())
        }
        Kernel::GatherRows => (params::GatherRows::fields(), size_of::<params::GatherRows>()),
    }
}

fn scalar_name(module: &Module, ty: naga::Handle<naga::Type>) -> &'static str {
    match module.types[ty].inner {
        TypeInner::Scalar(naga::Scalar::U32) => "u32",
        TypeInner::Scalar(naga::Scalar::F32) => "f32",
        ref other => panic!("a uniform member is {other:?}"),
    }
}

#[test]
fn uniform_layouts_match_the_rust_structs() {
    for (kernel, module, _) in composed() {
        let (_, uniform) =
            module.global_variables.iter().find(|(_, global)| global.space == AddressSpace::Uniform).unwrap();
        assert_eq!(uniform.binding.map(|b| (b.group, b.binding)), Some((0, 0)));
        let TypeInner::Struct { members, span } = &module.types[uniform.ty].inner else {
            panic!("{}: the uniform is no struct", kernel.name());
        };
        let found: Vec<_> = members
            .iter()
            .map(|m| (m.name.clone().unwrap_or_default(), m.offset as usize, scalar_name(&module, m.ty)))
            .collect();
        let (want, size) = fields(kernel);
        let want: Vec<_> = want.into_iter().map(|(name, offset, ty)| (name.to_owned(), offset, ty)).collect();
        assert_eq!((found, *span as usize), (want, size), "{}", kernel.name());
    }
}

#[test]
fn entry_points_use_exactly_the_bindings_of_their_kernel() {
    for (kernel, module, info) in composed() {
        let index = module.entry_points.iter().position(|entry| entry.name == kernel.entry()).unwrap();
        let entry = info.get_entry_point(index);
        let mut found: Vec<(u32, Access)> = Vec::new();
        for (handle, global) in module.global_variables.iter() {
            if let (AddressSpace::Storage { access }, false) = (global.space, entry[handle].is_empty()) {
                let writes = access.contains(naga::StorageAccess::STORE);
                let binding = global.binding.unwrap().binding;
                found.push((binding, if writes { Access::ReadWrite } else { Access::Read }));
            }
        }
        found.sort_by_key(|(binding, _)| *binding);
        assert_eq!(found, kernel.bindings(), "{}", kernel.name());
    }
}

#[test]
fn workgroups_fit_what_adapters_are_asked_for() {
    for (kernel, module, info) in composed() {
        let index = module.entry_points.iter().position(|entry| entry.name == kernel.entry()).unwrap();
        let entry = &module.entry_points[index];
        let invocations: u32 = entry.workgroup_size.iter().product();
        assert!(invocations <= crate::kernel::WORKGROUP_INVOCATIONS);
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let bytes: u32 = module
            .global_variables
            .iter()
            .filter(|(handle, global)| {
                global.space == AddressSpace::WorkGroup && !info.get_entry_point(index)[*handle].is_empty()
            })
            .map(|(_, global)| layouter[global.ty].size)
            .sum();
        assert!(bytes <= crate::kernel::WORKGROUP_BYTES, "{} takes {bytes} bytes", kernel.name());
    }
}

#[test]
fn shaders_translate_to_metal_direct3d_and_spirv() {
    use naga::back::{hlsl, msl, spv};
    for (kernel, module, info) in composed() {
        let name = kernel.name();
        let msl_options = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
        let (text, translated) =
            msl::write_string(&module, &info, &msl_options, &msl::PipelineOptions::default()).unwrap();
        assert!(text.contains("kernel void") && translated.entry_point_names.iter().all(Result::is_ok), "{name}: MSL");

        let mut text = String::new();
        let hlsl_options =
            hlsl::Options { shader_model: hlsl::ShaderModel::V6_2, fake_missing_bindings: true, ..Default::default() };
        let pipeline = hlsl::PipelineOptions::default();
        let reflected = hlsl::Writer::new(&mut text, &hlsl_options, &pipeline).write(&module, &info, None).unwrap();
        assert!(text.contains("numthreads") && reflected.entry_point_names.iter().all(Result::is_ok), "{name}: HLSL");

        // What subgroups need.
        let spv_options = spv::Options { lang_version: (1, 3), ..Default::default() };
        let words = spv::write_vec(&module, &info, &spv_options, None).unwrap();
        assert!(!words.is_empty(), "{name}: SPIR-V");
    }
}

#[test]
fn invocations_load_for_each_other_in_subgroups_of_one_size() {
    for ((least, most), lanes) in [((8, 8), 8), ((8, 16), 1), ((16, 16), 1), ((32, 64), 1)] {
        let teams = Teams::Subgroup { least, most };
        assert_eq!(teams.lanes(), lanes);
        let source = Kernel::MatmulWide(Encoding::F32).source(teams);
        assert_eq!(source.contains("subgroupBroadcast(y"), lanes > 1);
        // Rows of x that one invocation loads.
        assert_eq!(source.matches("= x[s").count(), 32 / lanes as usize);
    }
    assert_eq!(Teams::Workgroup.lanes(), 1);
}
