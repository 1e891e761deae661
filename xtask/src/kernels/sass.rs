//! Rules for the machine code of kernels (cuda/kernels/sass.toml), checked against nvdisasm's listing of each cubin.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::toolkit;

/// Instructions of one kernel: number of each (`LDG.E.128`), without operands.
type Counts = BTreeMap<String, usize>;
/// By architecture and kernel.
type Code = BTreeMap<String, BTreeMap<String, Counts>>;
/// Instructions (`LDG.128`, or `A|B` for several) and a limit.
type Limits = BTreeMap<String, usize>;

/// One rule of sass.toml, which explains the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    kernels: String,
    arch: Option<String>,
    #[serde(default)]
    at_least: Limits,
    #[serde(default)]
    at_most: Limits,
    #[serde(default)]
    exactly: Limits,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    rule: Vec<Rule>,
}

/// Whether the code in `out`/ARCH.cubin follows every rule; prints violations.
pub(super) fn hold<'a>(
    dir: &Path,
    toolkit: &Path,
    out: &Path,
    archs: impl Iterator<Item = &'a String>,
) -> Result<bool> {
    let text = std::fs::read_to_string(dir.join("sass.toml")).context("read sass.toml")?;
    let rules: Rules = toml::from_str(&text).context("parse sass.toml")?;
    let complaints = complaints(&rules.rule, &disassemble(toolkit, out, archs)?);
    for complaint in &complaints {
        println!("error: {complaint}");
    }
    if complaints.is_empty() {
        println!("kernels: machine code follows the {} rules of sass.toml", rules.rule.len());
    }
    Ok(complaints.is_empty())
}

/// Runs one nvdisasm for each architecture, all in parallel: they take seconds.
fn disassemble<'a>(toolkit: &Path, out: &Path, archs: impl Iterator<Item = &'a String>) -> Result<Code> {
    let listing = |arch: &str| out.join(format!("{arch}.sass"));
    let start = |arch: &'a String| -> Result<(&'a String, Child)> {
        let file = std::fs::File::create(listing(arch)).context("create a listing")?;
        let cubin = out.join(format!("{arch}.cubin"));
        let mut command = Command::new(toolkit::nvdisasm(toolkit));
        // nvdisasm 13 warns at each cubin of CUDA 12 that it lacks data flow, which no rule needs.
        command.arg("--print-code").arg(cubin).stdin(Stdio::null()).stdout(file).stderr(Stdio::null());
        Ok((arch, command.spawn().context("run nvdisasm")?))
    };
    let running = archs.map(start).collect::<Result<Vec<_>>>()?;
    let mut code = Code::new();
    for (arch, mut child) in running {
        let status = child.wait().context("wait for nvdisasm")?;
        ensure!(status.success(), "nvdisasm of {arch} failed: {status}");
        let text = std::fs::read_to_string(listing(arch)).context("read a listing")?;
        code.insert(arch.clone(), parse(&text)?);
    }
    Ok(code)
}

/// The lines `.section .text.KERNEL,…` and `/*0040*/ @!P0 LDG.E R6, … ;` of nvdisasm.
fn parse(listing: &str) -> Result<BTreeMap<String, Counts>> {
    let mut kernels = BTreeMap::new();
    let mut counts: Option<&mut Counts> = None;
    for line in listing.lines().map(str::trim_start) {
        if let Some(rest) = line.strip_prefix(".section\t") {
            let name = rest.strip_prefix(".text.").and_then(|rest| rest.split(',').next());
            counts = name.map(|name| kernels.entry(name.to_owned()).or_default());
        } else if let Some((_, rest)) = line.strip_prefix("/*").and_then(|line| line.split_once("*/")) {
            let mut words = rest.split_whitespace().skip_while(|word| word.starts_with('@'));
            if let (Some(counts), Some(name)) = (&mut counts, words.next()) {
                *counts.entry(name.trim_end_matches(';').to_owned()).or_default() += 1;
            }
        }
    }
    ensure!(kernels.values().any(|counts: &Counts| !counts.is_empty()), "nvdisasm lists no instruction");
    Ok(kernels)
}

fn complaints(rules: &[Rule], code: &Code) -> Vec<String> {
    let mut out = Vec::new();
    for rule in rules {
        for (arch, kernels) in code.iter().filter(|(arch, _)| rule.arch.as_ref().is_none_or(|only| only == *arch)) {
            let of_rule: Vec<_> = kernels.iter().filter(|(name, _)| matches(&rule.kernels, name)).collect();
            if of_rule.is_empty() {
                out.push(format!("no kernel for {arch} is named {}, which a rule of sass.toml is for", rule.kernels));
            }
            for (name, counts) in of_rule {
                out.extend(broken(rule, counts).map(|what| format!("{name} for {arch} has {what}")));
            }
        }
        if rule.arch.as_ref().is_some_and(|arch| !code.contains_key(arch)) {
            out.push(format!("a rule of sass.toml for {} is for an architecture that is not built", rule.kernels));
        }
    }
    out
}

/// The limits of a rule that a kernel breaks.
fn broken<'a>(rule: &'a Rule, counts: &'a Counts) -> impl Iterator<Item = String> + 'a {
    type Holds = fn(usize, usize) -> bool;
    let kinds: [(&Limits, &str, Holds); 3] = [
        (&rule.at_least, "at least", |found, limit| found >= limit),
        (&rule.at_most, "at most", |found, limit| found <= limit),
        (&rule.exactly, "exactly", |found, limit| found == limit),
    ];
    kinds.into_iter().flat_map(move |(limits, kind, holds)| {
        limits.iter().filter_map(move |(instructions, &limit)| {
            let found = count(counts, instructions);
            (!holds(found, limit)).then(|| format!("{found} {instructions} instructions, {kind} {limit} expected"))
        })
    })
}

/// Number of instructions that match one of `A|B`.
fn count(counts: &Counts, instructions: &str) -> usize {
    let one_of = |name: &str| instructions.split('|').any(|pattern| is(name, pattern));
    counts.iter().filter(|(name, _)| one_of(name)).map(|(_, count)| count).sum()
}

/// Whether an instruction (`LDG.E.LTC128B.128.CONSTANT`) matches a pattern (`LDG.128`): the same operation, with
/// every part.
fn is(name: &str, pattern: &str) -> bool {
    let mut parts = name.split('.');
    let mut wanted = pattern.split('.');
    parts.next() == wanted.next() && wanted.all(|part| parts.any(|found| found == part))
}

/// Whether a kernel's name matches a pattern in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, rest)) => name
            .strip_prefix(head)
            .is_some_and(|tail| (0..=tail.len()).any(|at| tail.get(at..).is_some_and(|tail| matches(rest, tail)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of nvdisasm's listing of two kernels; between two products, ptxas's code for serialization.
    const LISTING: &str = "\t.headerflags\t@\"EF_CUDA_TEXMODE_UNIFIED\"

//--------------------- .text.attention_wgmma_f16_64 --------------------------
\t.section\t.text.attention_wgmma_f16_64,\"ax\",@progbits
\t.sectionflags\t@\"SHF_BARRIERS=1\"
\t.align\t128
        .global         attention_wgmma_f16_64
attention_wgmma_f16_64:
.text.attention_wgmma_f16_64:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0060*/                   ISETP.NE.AND P0, PT, R6, RZ, PT ;
        /*0070*/              @!P0 EXIT ;
        /*0240*/                   USETMAXREG.DEALLOC.CTAPOOL 0x28 ;
        /*0b40*/             @!UP1 UTMALDG.2D [UR4], [UR6] ;
        /*0b50*/             @!UP1 UTMALDG.2D [UR12], [UR6] ;
        /*1240*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*1f00*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], RZ, !UPT ;
        /*1f10*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8], R24, gsb0 ;
        /*1f20*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
.L_x_1:
\t.section\t.text.gemv_f16_1,\"ax\",@progbits
.text.gemv_f16_1:
        /*0200*/                   LDG.E.NA.LTC128B.128.CONSTANT R4, desc[UR8][R2.64] ;
        /*0210*/               @P0 LDG.E R6, desc[UR8][R2.64+0x4] ;
        /*0220*/                   LDSM.16.M88.4 R8, [R10] ;
        /*0230*/                   BRA `(.L_x_2);
\t.section\t.nv.info,\"\",@\"SHT_CUDA_INFO\"
        /*0000*/ \t.byte\t0x04, 0x2f
";

    fn code(listing: &str) -> Code {
        Code::from([("sm_90a".to_owned(), parse(listing).unwrap())])
    }

    fn rule(kernels: &str, kind: &str, limit: &str) -> Rule {
        toml::from_str(&format!("kernels = \"{kernels}\"\narch = \"sm_90a\"\n{kind} = {{ {limit} }}")).unwrap()
    }

    #[test]
    fn instructions_are_counted_by_kernel() {
        let code = code(LISTING);
        let kernels = &code["sm_90a"];
        assert_eq!(kernels["attention_wgmma_f16_64"].values().sum::<usize>(), 10);
        assert_eq!(kernels["attention_wgmma_f16_64"]["EXIT"], 1, "behind a predicate");
        assert_eq!(kernels["gemv_f16_1"].values().sum::<usize>(), 4, "none of other sections");
        let counted = |pattern| count(&kernels["gemv_f16_1"], pattern);
        assert_eq!(
            [counted("LDG"), counted("LDG.128"), counted("LDS"), counted("LDG.128|LDSM"), counted("BRA")],
            [2, 1, 0, 2, 1]
        );
        assert!(parse("").is_err());
    }

    /// Every kind of rule of sass.toml holds for the listing, and fails for one with a mistake.
    #[test]
    fn each_rule_finds_its_mistake() {
        let (wgmma, gemv) = ("attention_wgmma_*", "gemv_*");
        let local = "/*1f30*/ @P1 STL.64 [R1], R2 ;\n\t.section\t.text.gemv_f16_1";
        let wait = "/*1f08*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n        /*1f10*/";
        for (rule, from, to) in [
            (rule(wgmma, "exactly", "HGMMA = 2"), "HGMMA.64x128x16.F32 R24, gdesc[UR4]", "HMMA.16816.F32 R24"),
            (rule(wgmma, "exactly", "UTMALDG = 2"), "UTMALDG.2D [UR12]", "LDGSTS.E.BYPASS.128 [R2]"),
            (rule(wgmma, "exactly", "\"USETMAXREG.DEALLOC\" = 1"), "USETMAXREG.DEALLOC.CTAPOOL 0x28", "NOP"),
            (rule(wgmma, "exactly", "\"USETMAXREG.TRY_ALLOC\" = 1"), "USETMAXREG.TRY_ALLOC.CTAPOOL", "NOP"),
            (rule(wgmma, "at_most", "\"WARPGROUP.DEPBAR\" = 1"), "/*1f10*/", wait),
            (rule(gemv, "at_least", "\"LDG.128\" = 1"), "LTC128B.128.CONSTANT", "LTC128B.64.CONSTANT"),
            (rule("*", "at_most", "\"LDL|STL\" = 0"), "\t.section\t.text.gemv_f16_1", local),
            (rule("*", "at_most", "\"LDL|STL\" = 0"), "LDG.E R6, desc[UR8][R2.64+0x4]", "LDL R6, [R1]"),
        ] {
            assert!(LISTING.contains(from), "{from}");
            let rules = [rule];
            assert_eq!(complaints(&rules, &code(LISTING)), [""; 0]);
            assert_eq!(complaints(&rules, &code(&LISTING.replacen(from, to, 1))).len(), 1, "{from} -> {to}");
        }
    }

    #[test]
    fn a_rule_without_a_kernel_is_an_error() {
        for (kernels, arch) in [("attention_wgmma_*_96", "sm_90a"), ("gemv_*", "sm_100a")] {
            let rule = Rule { arch: Some(arch.to_owned()), ..rule(kernels, "at_least", "LDG = 0") };
            assert_eq!(complaints(&[rule], &code(LISTING)).len(), 1, "{kernels} for {arch}");
        }
    }

    #[test]
    fn patterns_match_whole_names() {
        assert!(matches("attention_wgmma_*_64", "attention_wgmma_bf16_64") && matches("kv_*pack", "kv_unpack"));
        assert!(!matches("attention_wgmma_*_64", "attention_wgmma_bf16_641") && !matches("merge", "attention_merge"));
    }
}
