//! Flags of vLLM, SGLang and llama-server that `lagoon serve` and `lagoon up` do not have: the error names Lagoon's own flag, or says
//! that there is none.

use Lagoon::{Always, Called, Otherwise};
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The commands that start servers as those programs do.
const COMMANDS: [&str; 2] = ["serve", "up"];

/// What Lagoon has in place of a foreign flag.
#[derive(Clone, Copy, Debug)]
enum Lagoon {
    /// A flag of another name, and how its value differs (may be empty).
    Called(&'static str, &'static str),
    /// What Lagoon does without a flag.
    Always(&'static str),
    /// No counterpart, and what to do.
    Otherwise(&'static str),
}

const ONE_DEVICE: Lagoon = Otherwise(
    "an instance runs a whole model on one device; `lagoon up --instances N --device 0,1` starts one on each device, and they share \
     their KV memory",
);
const FROM_FILES: Lagoon = Always("it is read from the model's files");
const IN_REQUESTS: Lagoon = Otherwise("it is a field of requests; defaults are in the model's generation_config.json");
const NO_ADAPTERS: Lagoon = Otherwise("adapters (LoRA) are not served; merge them into the weights");
const TEXT_ONLY: Lagoon = Otherwise("only text is served");
const MODEL: Lagoon =
    Otherwise("the model is an argument: `lagoon serve MODEL`, a directory, a GGUF file, org/name or org/name:Q4_K_M");
const LOGS: Lagoon = Called("--log", "a tracing filter such as info or debug");

/// Foreign flags by what they mean here.
const TABLE: &[(&[&str], Lagoon)] = &[
    (&["--max-num-seqs", "--max-running-requests", "-np", "--parallel", "--n-parallel"], Called("--max-running", "")),
    (&["--max-queued-requests"], Called("--max-queue", "")),
    (
        &["--max-num-batched-tokens", "--chunked-prefill-size", "-b", "--batch-size", "-ub", "--ubatch-size"],
        Called("--step-tokens", ""),
    ),
    (
        &["--gpu-memory-utilization", "--mem-fraction-static"],
        Called("--memory-percent", "in percent: 90, not 0.9; --kv-tokens sets the KV memory itself"),
    ),
    (
        &["-c", "--ctx-size", "--max-total-tokens"],
        Called("--kv-tokens", "tokens of all requests together; --max-model-len limits one request"),
    ),
    (&["--num-gpu-blocks-override", "--kv-cache-memory-bytes"], Called("--kv-tokens", "in tokens")),
    (&["--context-length"], Called("--max-model-len", "")),
    (
        &[
            "--enable-prefix-caching",
            "--no-enable-prefix-caching",
            "--disable-radix-cache",
            "--cache-prompt",
            "--no-cache-prompt",
        ],
        Called("--prefix-cache", "on, the default, or off"),
    ),
    (&["--cache-reuse"], Called("--prefix-cache", "common prefixes only")),
    (
        &["--kv-cache-dtype", "-ctk", "-ctv", "--cache-type-k", "--cache-type-v"],
        Called("--kv-dtype", "K and V have one type"),
    ),
    (&["--block-size", "--page-size"], Called("--block-tokens", "")),
    (&["--swap-space"], Called("--host-kv-tokens", "in tokens of each instance")),
    (
        &["--kv-offloading-size", "--hicache-size", "--cache-ram", "-cram"],
        Called("--host-cache-tokens", "in tokens of each instance"),
    ),
    (
        &["--cpu-offload-gb", "-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor"],
        Otherwise("weights are whole on one device; packed weights (GGUF, FP8, 4 bits) need less memory"),
    ),
    (
        &["-ngl", "--gpu-layers", "--n-gpu-layers"],
        Called("--backend", "all layers are on one device: cpu, wgpu or cuda"),
    ),
    (&["-dev", "-mg", "--main-gpu"], Called("--device", "")),
    (
        &[
            "-tp",
            "--tensor-parallel-size",
            "--tp-size",
            "--tp",
            "-pp",
            "--pipeline-parallel-size",
            "--pp-size",
            "-sm",
            "--split-mode",
            "-ts",
            "--tensor-split",
            "--enable-expert-parallel",
            "--ep-size",
            "--distributed-executor-backend",
            "--nnodes",
            "--node-rank",
        ],
        ONE_DEVICE,
    ),
    (
        &["-dp", "--data-parallel-size", "--dp-size", "--dp"],
        Called("--instances", "of `lagoon up`, which also share their KV memory"),
    ),
    (
        &["--kv-transfer-config", "--disaggregation-mode"],
        Called("--role", "of `lagoon serve`: prefill or decode; `lagoon up --prefill N --decode M` starts both"),
    ),
    (
        &[
            "--speculative-config",
            "--num-speculative-tokens",
            "--speculative-num-draft-tokens",
            "--draft-n",
            "--draft-max",
        ],
        Called("--draft-tokens", "with --draft MODEL for a second model, else by prompt lookup"),
    ),
    (&["-md", "--model-draft", "--speculative-draft-model-path", "--speculative-algorithm"], Called("--draft", "")),
    (&["--reasoning-format"], Called("--reasoning-parser", "")),
    (&["-tb", "--threads-batch", "-t"], Called("--threads", "")),
    (&["-a", "--alias"], Called("--served-model-name", "of `lagoon serve`")),
    (&["--api-key-file"], Called("--key-file", "TOML with scopes and rate limits")),
    (&["--ssl-certfile", "--ssl-cert-file"], Called("--https-cert", "")),
    (&["--ssl-keyfile", "--ssl-key-file"], Called("--https-key", "")),
    (
        &[
            "--uvicorn-log-level",
            "--log-level",
            "-v",
            "--verbose",
            "-lv",
            "--verbosity",
            "--log-verbosity",
            "--log-disable",
        ],
        LOGS,
    ),
    (&["--max-log-len", "--disable-log-requests", "--enable-log-requests", "--disable-log-stats"], LOGS),
    (&["--swa-full"], Called("--kv-groups", "off, the default, keeps the KV of all layers")),
    (&["--kv-unified", "-kvu"], Always("all requests share the KV memory")),
    (&["-m", "--model", "--model-path", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url"], MODEL),
    (&["--revision", "--code-revision"], Otherwise("a revision is part of the model's name: org/name@REVISION")),
    (&["--download-dir"], Otherwise("models are kept in the Hugging Face cache: HF_HUB_CACHE or HF_HOME names it")),
    (&["--hf-token", "-hft"], Otherwise("the token is in HF_TOKEN or in the file of `huggingface-cli login`")),
    (
        &[
            "-q",
            "--quantization",
            "--tokenizer",
            "--tokenizer-path",
            "--tokenizer-mode",
            "--load-format",
            "--trust-remote-code",
            "--generation-config",
            "--hf-config-path",
            "--config-format",
            "--rope-scaling",
            "--rope-scale",
            "--rope-theta",
            "--rope-freq-base",
            "--yarn-orig-ctx",
        ],
        FROM_FILES,
    ),
    (
        &["--chat-template", "--chat-template-file"],
        Otherwise("the model's own template is used: chat_template.jinja or tokenizer_config.json in its directory"),
    ),
    (
        &["--hf-overrides", "--json-model-override-args"],
        Otherwise("edit config.json in a copy of the model's directory"),
    ),
    (&["--enable-auto-tool-choice", "--jinja"], Always("tools work without a flag; --tool-parser names the format")),
    (&["--enable-chunked-prefill"], Always("prompts are computed in chunks of --step-tokens")),
    (&["-cb", "--cont-batching"], Always("batches are continuous")),
    (
        &["-fa", "--flash-attn", "--attention-backend"],
        Always("each backend has one attention, which needs no memory for scores"),
    ),
    (&["--metrics", "--enable-metrics"], Always("/metrics is served; --admin-key protects it")),
    (
        &["--enforce-eager", "-O", "--compilation-config", "--disable-cuda-graph", "--cuda-graph-max-bs"],
        Otherwise("nothing is compiled by request; steps are captured as CUDA graphs where that is possible"),
    ),
    (
        &[
            "--seed",
            "-s",
            "--temp",
            "--temperature",
            "--top-k",
            "--top-p",
            "--min-p",
            "-n",
            "--predict",
            "--n-predict",
            "--override-generation-config",
            "--repeat-penalty",
        ],
        IN_REQUESTS,
    ),
    (&["--enable-lora", "--lora-modules", "--lora-paths", "--lora", "--lora-scaled"], NO_ADAPTERS),
    (&["--limit-mm-per-prompt", "-mm", "--mmproj", "--mm-processor-kwargs", "--enable-multimodal"], TEXT_ONLY),
    (&["--no-mmap", "--mlock", "--numa"], Otherwise("weights are mapped from the file and copied to the device once")),
    (&["--webui", "--no-webui", "--path"], Otherwise("there is no web page; `lagoon chat` talks in the terminal")),
];

/// What stands for `flag` in [`TABLE`].
fn find(flag: &str) -> Option<Lagoon> {
    TABLE.iter().find(|(names, _)| names.contains(&flag)).map(|(_, lagoon)| *lagoon)
}

/// The foreign flag that clap's error is about: as it stands on the command line, for `-ngl 99` is `-n` to clap.
fn flag<'a>(unknown: &str, arguments: &'a [String]) -> Option<&'a str> {
    let mut names =
        arguments.iter().map(|argument| argument.split_once('=').map_or(argument.as_str(), |(name, _)| name));
    names.find(|name| *name == unknown || (unknown.len() == 2 && !name.starts_with("--") && name.starts_with(unknown)))
}

/// The message for a command line that clap refused because of a foreign flag; `None` for any other.
pub(crate) fn explain(error: &clap::Error, arguments: &[String]) -> Option<String> {
    if !arguments.iter().any(|word| COMMANDS.contains(&word.as_str())) {
        return None;
    }
    let flag = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(unknown))) => flag(unknown, arguments)?,
        // `-hf org/name` begins with the flag for help.
        (ErrorKind::DisplayHelp, _) => flag("-h", arguments)?,
        _ => return None,
    };
    let hint = match find(flag)? {
        Called(own, "") => format!("lagoon calls this {own}"),
        Called(own, how) => format!("lagoon calls this {own} ({how})"),
        Always(why) => format!("leave it out: {why}"),
        Otherwise(what) => format!("lagoon has no such flag: {what}"),
    };
    Some(format!("error: unexpected argument '{flag}'\nhint: {hint}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::{CommandFactory as _, Parser as _};
    use std::collections::BTreeSet;

    fn explained(line: &str) -> Option<String> {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        explain(&Cli::try_parse_from(&arguments).unwrap_err(), &arguments)
    }

    fn names(command: &str) -> BTreeSet<String> {
        let mut cli = Cli::command();
        cli.build();
        let command = cli.find_subcommand(command).unwrap();
        let long = command.get_arguments().flat_map(|arg| arg.get_long_and_visible_aliases().unwrap_or_default());
        let short = command.get_arguments().filter_map(|arg| arg.get_short());
        long.map(|name| format!("--{name}")).chain(short.map(|c| format!("-{c}"))).collect()
    }

    #[test]
    fn every_flag_is_foreign_and_every_counterpart_is_there() {
        let (serve, up) = (names("serve"), names("up"));
        let mut seen = BTreeSet::new();
        for (foreign, lagoon) in TABLE {
            for flag in *foreign {
                assert!(seen.insert(*flag), "{flag} stands in the table twice");
                assert!(!serve.contains(*flag) && !up.contains(*flag), "{flag} is a flag of lagoon");
            }
            match lagoon {
                Called(own, how) if how.contains("`lagoon up`") && !serve.contains(*own) => {
                    assert!(up.contains(*own), "{own}")
                }
                Called(own, _) => assert!(serve.contains(*own), "{own}"),
                Always(text) | Otherwise(text) => assert!(!text.is_empty(), "{foreign:?}"),
            }
        }
    }

    /// Each one, as the error of a real command line.
    #[test]
    fn every_flag_of_the_table_is_answered() {
        for flag in TABLE.iter().flat_map(|(names, _)| *names) {
            for line in
                [format!("lagoon serve m {flag} 1"), format!("lagoon serve m {flag}=1"), format!("lagoon up {flag}")]
            {
                let message = explained(&line).unwrap_or_else(|| panic!("{line}"));
                assert!(
                    message.starts_with(&format!("error: unexpected argument '{flag}'\nhint: ")),
                    "{line}: {message}"
                );
            }
        }
    }

    #[test]
    fn hints_name_the_flag() {
        let hint = |line| explained(line).unwrap();
        let seqs = hint("lagoon serve m --max-num-seqs 8");
        assert_eq!(seqs, "error: unexpected argument '--max-num-seqs'\nhint: lagoon calls this --max-running\n");
        assert!(hint("lagoon serve m --ctx-size=8192").contains("calls this --kv-tokens ("));
        assert!(hint("lagoon up m -ngl 99").contains("'-ngl'\nhint: lagoon calls this --backend ("));
        assert!(
            hint("lagoon serve m -tp 2")
                .contains("hint: lagoon has no such flag: an instance runs a whole model on one device")
        );
        assert!(hint("lagoon serve m --enable-chunked-prefill").contains("hint: leave it out: "));
    }

    #[test]
    fn other_errors_stay_claps() {
        assert_eq!(explained("lagoon serve m --kv-tokeens 8"), None);
        assert_eq!(explained("lagoon serve m --kv-tokens x"), None);
        assert_eq!(explained("lagoon chat --ctx-size 8"), None);
    }
}
