//! `lagoon quantize`: a model in 16 or 32 bits becomes a GGUF file with packed weights.

use crate::log::{notice, outln};
use crate::model::{resolve, short_name};
use crate::progress::{self, Unit};
use crate::shutdown;
use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use indicatif::HumanBytes;
use lagoon_quantize::{Importance, KindSummary, Options, Source, Summary, Target, calibrate};
use serde_json::json;
use std::path::{Path, PathBuf};
use tokio_util::sync::CancellationToken;

/// Tokens of the calibration text that are used.
const CALIBRATION_TOKENS: u32 = 16_384;

/// `lagoon quantize`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct QuantizeArgs {
    /// The model: a directory, a hub name, or a GGUF file, with weights in f32, f16 or bf16.
    #[arg(value_name = "MODEL")]
    model: String,
    /// The file to write.
    #[arg(value_name = "OUT.gguf")]
    out: PathBuf,
    /// Format of most matrices. With 4 to 6 bits the output matrix is in q6_k; with q4_k and q5_k, so are values and down projections
    /// of half of the layers. Rows that are no whole blocks are in q8_0 or f16. Vectors stay in f32.
    #[arg(long, value_name = "FORMAT")]
    format: Format,
    /// Weigh errors by what each column is multiplied with when the model reads this text. It runs on the CPU, with the weights in
    /// memory [default: all columns weigh the same].
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Tokens of the text to read at most.
    #[arg(long, value_name = "N", requires = "calibration", default_value_t = CALIBRATION_TOKENS, value_parser = clap::value_parser!(u32).range(64..=1 << 22))]
    calibration_tokens: u32,
    /// Replace OUT.gguf if it is there.
    #[arg(long)]
    force: bool,
    /// Threads [default: all cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A format by the name that users type.
#[derive(Clone, Copy, Debug)]
struct Format(Target, &'static str);

const FORMATS: [Format; Target::ALL.len()] = {
    let mut formats = [Format(Target::F16, ""); Target::ALL.len()];
    let mut i = 0;
    while i < formats.len() {
        formats[i] = Format(Target::ALL[i].0, Target::ALL[i].1);
        i += 1;
    }
    formats
};

impl ValueEnum for Format {
    fn value_variants<'a>() -> &'a [Self] {
        &FORMATS
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.1))
    }
}

/// Writes the file, and prints what became of the weights.
pub(crate) async fn run(args: QuantizeArgs) -> anyhow::Result<()> {
    let stop = shutdown::token(false)?;
    // The thread sees the stop itself, and removes its file.
    tokio::task::spawn_blocking(move || quantize(&args, &stop)).await.context("quantize")?
}

fn quantize(args: &QuantizeArgs, stop: &CancellationToken) -> anyhow::Result<()> {
    let threads = match args.threads {
        Some(threads) => threads as usize,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    // Refused before the model is downloaded, and once more when the file is complete.
    lagoon_quantize::check_place(&args.out, args.force)?;
    let path = resolve(&args.model)?;
    let source = Source::open(&path, &short_name(&args.model))?;
    let importance = match &args.calibration {
        Some(text) => Some(measure(&source, text, (args.calibration_tokens as usize, threads), stop)?),
        None => None,
    };
    let bar = progress::bar("quantizing", 0, Unit::Bytes);
    let Format(target, _) = args.format;
    let options = Options { target, importance: importance.as_ref(), threads, force: args.force };
    let summary = source.write(&args.out, options, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        !stop.is_cancelled()
    })?;
    bar.finish_and_clear();
    let mut notices = source.notices().to_vec();
    notices.extend(summary.kinds.iter().filter_map(unfit));
    if args.json {
        outln!("{}", as_json(args, &source, &summary, (&notices, importance.as_ref())));
        return Ok(());
    }
    notices.iter().for_each(|text| notice(&format!("note: {text}\n")));
    print(args, &summary, importance.as_ref());
    Ok(())
}

/// Runs the model over the calibration text.
fn measure(
    source: &Source,
    text: &Path,
    limits: (usize, usize),
    stop: &CancellationToken,
) -> anyhow::Result<Importance> {
    let bar = progress::bar("calibrating", 0, Unit::Tokens);
    let importance = calibrate(source, text, limits, &mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        !stop.is_cancelled()
    })?;
    bar.finish_and_clear();
    Ok(importance)
}

/// That tensors have another format than they were meant to.
fn unfit(of: &KindSummary) -> Option<String> {
    let (cols, wanted) = of.unfit?;
    let block = wanted.block().elements;
    Some(format!("{} is in {}, because rows of {cols} are no whole blocks of {block} ({wanted})", of.kind, of.format))
}

fn print(args: &QuantizeArgs, summary: &Summary, importance: Option<&Importance>) {
    outln!("{:<22} {:<7} {:>8} {:>12} {:>15}", "tensors", "format", "number", "size", "relative error");
    for of in &summary.kinds {
        let (size, error) = (HumanBytes(of.bytes).to_string(), 100.0 * of.relative_rms);
        outln!("{:<22} {:<7} {:>8} {size:>12} {error:>14.3}%", of.kind, of.format, of.tensors);
    }
    let columns = match importance {
        Some(importance) => format!("columns weighed by {} tokens", importance.tokens()),
        None => "columns weigh the same".to_owned(),
    };
    outln!(
        "{}: {} from {}, {:.2} bits a weight, relative RMS error of matrices {:.3}% ({columns})",
        args.out.display(),
        HumanBytes(summary.bytes),
        HumanBytes(summary.bytes_before),
        summary.bits,
        100.0 * summary.relative_rms
    );
}

fn as_json(
    args: &QuantizeArgs,
    source: &Source,
    summary: &Summary,
    (notices, importance): (&[String], Option<&Importance>),
) -> serde_json::Value {
    let kind = |of: &KindSummary| {
        json!({"tensors": of.kind, "format": of.format.name(), "number": of.tensors, "elements": of.elements,
               "bytes": of.bytes, "relative_rms_error": of.relative_rms})
    };
    json!({
        "model": args.model,
        "file": args.out,
        "format": args.format.1,
        "parameters": source.parameters(),
        "calibration_tokens": importance.map(Importance::tokens),
        "bytes_before": summary.bytes_before,
        "bytes": summary.bytes,
        "bits_per_weight": summary.bits,
        "relative_rms_error": summary.relative_rms,
        "kinds": summary.kinds.iter().map(kind).collect::<Vec<_>>(),
        "notices": notices,
    })
}
