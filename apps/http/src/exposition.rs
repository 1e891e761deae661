//! Prometheus' text format (version 0.0.4): strict parsing, joining metrics of several processes, writing in a stable order.
//!
//! Invariants of an [`Exposition`], which [`Exposition::parse`] checks: names are valid; a family has one kind and its samples
//! stand together; no two samples have the same name and labels; the buckets of a histogram grow up to its count.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Label of the process that a series is of.
const INSTANCE: &str = "instance";
/// A label [`INSTANCE`] that a process gave its own series, as Prometheus names it.
const EXPORTED_INSTANCE: &str = "exported_instance";

/// The kind of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyKind {
    Counter,
    Gauge,
    Histogram,
    Summary,
    Untyped,
}

impl FamilyKind {
    const ALL: [Self; 5] = [Self::Counter, Self::Gauge, Self::Histogram, Self::Summary, Self::Untyped];

    /// Its name in a `# TYPE` line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Summary => "summary",
            Self::Untyped => "untyped",
        }
    }

    /// What the names of its samples may have behind the family's name.
    fn suffixes(self) -> &'static [&'static str] {
        match self {
            Self::Histogram => &["_bucket", "_sum", "_count"],
            Self::Summary => &["", "_sum", "_count"],
            Self::Counter | Self::Gauge | Self::Untyped => &[""],
        }
    }
}

/// Labels of a series: names with values.
pub type Labels = Vec<(String, String)>;

/// One line with a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Behind the family's name.
    pub suffix: &'static str,
    pub labels: Labels,
    /// As written: a number, `+Inf`, `-Inf` or `NaN`.
    pub value: String,
}

impl Sample {
    /// A sample without a suffix.
    #[must_use]
    pub fn new(labels: Labels, value: impl ToString) -> Self {
        Self { suffix: "", labels, value: value.to_string() }
    }

    /// The value of a label.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
    }

    /// The value as a number.
    #[must_use]
    pub fn number(&self) -> f64 {
        number(&self.value).unwrap_or(f64::NAN)
    }

    /// Its labels but those of a bucket or quantile, in order: what makes a series.
    fn series(&self) -> Vec<(&str, &str)> {
        let own = self.labels.iter().filter(|(name, _)| name != "le" && name != "quantile");
        let mut labels: Vec<_> = own.map(|(name, value)| (name.as_str(), value.as_str())).collect();
        labels.sort_unstable();
        labels
    }
}

/// All samples of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    pub kind: FamilyKind,
    /// The text of its `# HELP` line, as written.
    pub help: String,
    pub samples: Vec<Sample>,
}

/// The metrics of one process or several, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exposition {
    pub families: BTreeMap<String, Family>,
}

/// A line that breaks a rule of the format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct FormatError {
    pub line: usize,
    pub reason: String,
}

impl Exposition {
    /// Parses `text`.
    ///
    /// # Errors
    /// The first line that breaks a rule.
    pub fn parse(text: &str) -> Result<Self, FormatError> {
        if !text.is_empty() && !text.ends_with('\n') {
            return Err(FormatError { line: text.lines().count(), reason: "the last line has no end".to_owned() });
        }
        let mut parser = Parser::default();
        for (line, content) in text.split('\n').enumerate() {
            parser.line(content).map_err(|reason| FormatError { line: line + 1, reason })?;
        }
        parser.finish().map_err(|reason| FormatError { line: text.lines().count(), reason })
    }

    /// Adds the metrics of the process `instance`, which becomes a label of every series. Returns the names of families that this
    /// one has with another kind: they are left out.
    pub fn join(&mut self, instance: &str, other: Self) -> Vec<String> {
        let mut refused = Vec::new();
        for (name, mut family) in other.families {
            for sample in &mut family.samples {
                let own = sample.labels.iter_mut().filter(|(label, _)| label == INSTANCE);
                own.for_each(|(label, _)| EXPORTED_INSTANCE.clone_into(label));
                sample.labels.insert(0, (INSTANCE.to_owned(), instance.to_owned()));
            }
            let empty = || Family { kind: family.kind, help: String::new(), samples: Vec::new() };
            let into = self.families.entry(name.clone()).or_insert_with(empty);
            if into.kind != family.kind {
                refused.push(name);
                continue;
            }
            into.samples.extend(family.samples);
            if into.help.is_empty() {
                into.help = family.help;
            }
        }
        refused
    }

    /// Adds a family of which every sample is given; none without samples.
    pub fn insert(&mut self, name: &str, kind: FamilyKind, help: &str, samples: Vec<Sample>) {
        if !samples.is_empty() {
            self.families.insert(name.to_owned(), Family { kind, help: help.to_owned(), samples });
        }
    }

    /// The text: families by name, their series by labels.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        for (name, Family { kind, help, samples }) in &self.families {
            if !help.is_empty() {
                let _ = writeln!(out, "# HELP {name} {help}");
            }
            let _ = writeln!(out, "# TYPE {name} {}", kind.name());
            let mut samples: Vec<&Sample> = samples.iter().collect();
            // Stable: the buckets of a series keep their order.
            samples.sort_by_cached_key(|sample| sample.series());
            for Sample { suffix, labels, value } in samples {
                let _ = writeln!(out, "{name}{suffix}{} {value}", labels_text(labels));
            }
        }
        out
    }
}

fn labels_text(labels: &[(String, String)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let label = |(name, value): &(String, String)| format!("{name}=\"{}\"", escaped(value));
    format!("{{{}}}", labels.iter().map(label).collect::<Vec<_>>().join(","))
}

/// A label's value as it stands between quotes.
#[must_use]
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        _ if text.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b)) => text.parse().ok(),
        _ => None,
    }
}

/// Whether `name` is a valid name: of a metric with colons, else of a label.
fn is_name(name: &str, colons: bool) -> bool {
    let letter = |b: u8| b.is_ascii_alphabetic() || b == b'_' || (colons && b == b':');
    name.bytes().enumerate().all(|(at, b)| letter(b) || (at > 0 && b.is_ascii_digit())) && !name.is_empty()
}

#[derive(Default)]
struct Parser {
    done: Exposition,
    /// The family whose lines are being read.
    name: String,
    kind: Option<FamilyKind>,
    help: Option<String>,
    samples: Vec<Sample>,
    /// Names and labels of its samples.
    seen: BTreeSet<(&'static str, Labels)>,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let Some(comment) = line.strip_prefix('#') else {
            return if line.trim().is_empty() { Ok(()) } else { self.sample(line) };
        };
        let words = comment.trim_start_matches([' ', '\t']);
        let (what, rest) = words.split_once(' ').unwrap_or((words, ""));
        let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
        match what {
            "HELP" => {
                self.begin(name)?;
                let twice = self.help.replace(text.to_owned()).is_some();
                if twice { Err(format!("{name} has two HELP lines")) } else { Ok(()) }
            }
            "TYPE" => {
                self.begin(name)?;
                let kind = FamilyKind::ALL.into_iter().find(|kind| kind.name() == text);
                let kind = kind.ok_or_else(|| format!("{text:?} is no type"))?;
                if !self.samples.is_empty() {
                    return Err(format!("the type of {name} is behind its samples"));
                }
                let twice = self.kind.replace(kind).is_some();
                if twice { Err(format!("{name} has two TYPE lines")) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// The lines of `name` begin, if it is another family.
    fn begin(&mut self, name: &str) -> Result<(), String> {
        if !is_name(name, true) {
            return Err(format!("{name:?} is no name of a metric"));
        }
        if self.name == name {
            return Ok(());
        }
        self.end()?;
        if self.done.families.contains_key(name) {
            return Err(format!("the lines of {name} do not stand together"));
        }
        name.clone_into(&mut self.name);
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        let (name, samples) = (std::mem::take(&mut self.name), std::mem::take(&mut self.samples));
        let (kind, help) = (self.kind.take().unwrap_or(FamilyKind::Untyped), self.help.take().unwrap_or_default());
        self.seen.clear();
        if kind == FamilyKind::Histogram {
            check_histogram(&name, &samples)?;
        }
        if !name.is_empty() {
            self.done.families.insert(name, Family { kind, help, samples });
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Exposition, String> {
        self.end()?;
        Ok(self.done)
    }

    fn sample(&mut self, line: &str) -> Result<(), String> {
        let end = line.find(|c: char| c == '{' || c.is_ascii_whitespace()).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest)?,
            None => (Vec::new(), rest),
        };
        let mut words = rest.split_ascii_whitespace();
        let value = words.next().filter(|value| number(value).is_some()).ok_or("a sample has no number")?;
        if words.next().is_some_and(|time| time.parse::<i64>().is_err()) || words.next().is_some() {
            return Err("there is more than a time behind a value".to_owned());
        }
        let of = |suffix: &&&str| self.kind.is_some() && name.strip_suffix(**suffix) == Some(self.name.as_str());
        let suffix = match self.kind.unwrap_or(FamilyKind::Untyped).suffixes().iter().find(of) {
            Some(suffix) => *suffix,
            None => {
                // Without a type, or of the next family.
                self.begin(name)?;
                if self.kind.is_some_and(|kind| !kind.suffixes()[0].is_empty()) {
                    return Err(format!("{name} is no sample of its family"));
                }
                ""
            }
        };
        let mut sorted = labels.clone();
        sorted.sort_unstable();
        if !self.seen.insert((suffix, sorted)) {
            return Err(format!("{name} has two samples with the same labels"));
        }
        self.samples.push(Sample { suffix, labels, value: value.to_owned() });
        Ok(())
    }
}

/// Labels up to the closing brace, and what is behind it.
fn labels(text: &str) -> Result<(Labels, &str), String> {
    let (mut labels, mut rest) = (Labels::new(), text);
    loop {
        rest = rest.trim_start_matches([' ', '\t']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Ok((labels, rest));
        }
        let (name, value) = rest.split_once("=\"").ok_or("a label has no value")?;
        if !is_name(name, false) || name.starts_with("__") || labels.iter().any(|(other, _)| other == name) {
            return Err(format!("{name:?} is no name of a label, or stands twice"));
        }
        let (value, behind) = quoted(value)?;
        labels.push((name.to_owned(), value));
        rest = behind.strip_prefix(',').unwrap_or(behind);
        if behind == rest && !rest.starts_with('}') {
            return Err("labels are not separated by commas".to_owned());
        }
    }
}

/// A label's value up to its closing quote, and what is behind it.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let (mut value, mut escape) = (String::new(), false);
    for (at, c) in text.char_indices() {
        match (std::mem::take(&mut escape), c) {
            (false, '"') => return Ok((value, &text[at + 1..])),
            (false, '\\') => escape = true,
            (false, c) => value.push(c),
            (true, 'n') => value.push('\n'),
            (true, '\\' | '"') => value.push(c),
            (true, c) => return Err(format!("\\{c} is no escape")),
        }
    }
    Err("a label's value has no end".to_owned())
}

/// Each series of a histogram has buckets that grow up to `+Inf`, which is its count, and a sum.
fn check_histogram(name: &str, samples: &[Sample]) -> Result<(), String> {
    let mut series: BTreeMap<Vec<(&str, &str)>, Vec<&Sample>> = BTreeMap::new();
    samples.iter().for_each(|sample| series.entry(sample.series()).or_default().push(sample));
    for samples in series.values() {
        let of = |suffix: &'static str| samples.iter().filter(move |sample| sample.suffix == suffix);
        let bucket = |sample: &&&Sample| Some((number(sample.label("le")?)?, sample.number()));
        let buckets: Option<Vec<(f64, f64)>> = of("_bucket").map(|sample| bucket(&sample)).collect();
        let buckets = buckets.ok_or_else(|| format!("a bucket of {name} has no bound"))?;
        let grow = buckets.is_sorted_by(|(bound, count), (next, more)| bound < next && count <= more);
        let last = buckets.last().copied();
        let count = of("_count").next().map(|sample| (f64::INFINITY, sample.number()));
        if !grow || last.is_none() || last != count || of("_sum").count() != 1 {
            return Err(format!("the buckets of {name} do not grow up to its count, or it has no sum"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP b_total how many\n# TYPE b_total counter\nb_total{x=\"2\"} 2\nb_total{x=\"1\"} 1\n\n\
        # TYPE a gauge\na 0.5\n# a comment\n# HELP h seconds\n# TYPE h histogram\n\
        h_bucket{k=\"z\",le=\"0.5\"} 1\nh_bucket{k=\"z\",le=\"10\"} 2\nh_bucket{k=\"z\",le=\"+Inf\"} 2\nh_sum{k=\"z\"} 3\n\
        h_count{k=\"z\"} 2\nuntyped{q=\"a\\\\b\\\"c\\nd\"} NaN\n";

    #[test]
    fn text_is_sorted_by_name_and_labels_and_parses_to_the_same() {
        let parsed = Exposition::parse(TEXT).unwrap();
        let text = parsed.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["# TYPE a gauge", "a 0.5"]);
        assert_eq!(
            lines[2..6],
            ["# HELP b_total how many", "# TYPE b_total counter", "b_total{x=\"1\"} 1", "b_total{x=\"2\"} 2"]
        );
        assert_eq!(lines[8..10], ["h_bucket{k=\"z\",le=\"0.5\"} 1", "h_bucket{k=\"z\",le=\"10\"} 2"]);
        assert_eq!(parsed.families["untyped"].samples[0].label("q"), Some("a\\b\"c\nd"));
        assert!(text.ends_with("untyped{q=\"a\\\\b\\\"c\\nd\"} NaN\n"), "{text}");
        let again = Exposition::parse(&text).unwrap();
        assert_eq!(again.text(), text);
        assert_eq!(again.families.len(), 4);
    }

    #[test]
    fn lines_that_break_a_rule_are_refused_with_their_number() {
        for (text, line) in [
            ("a 1", 1),
            ("a 1\n1a 2\n", 2),
            ("a{1=\"x\"} 1\n", 1),
            ("a{x=\"1\",x=\"2\"} 1\n", 1),
            ("a{__x=\"1\"} 1\n", 1),
            ("a{x=\"1\" y=\"2\"} 1\n", 1),
            ("a{x=\"\\q\"} 1\n", 1),
            ("a{x=\"1} 1\n", 1),
            ("a one\n", 1),
            ("a inf\n", 1),
            ("a 1 now\n", 1),
            ("a\n", 1),
            ("a 1\na 2\n", 2),
            ("a{x=\"1\",y=\"2\"} 1\na{y=\"2\",x=\"1\"} 1\n", 2),
            ("# TYPE a gauge\n# TYPE a counter\n", 2),
            ("# HELP a x\n# HELP a y\n", 2),
            ("# TYPE a meter\n", 1),
            ("a 1\n# TYPE a gauge\n", 2),
            ("# TYPE a gauge\na 1\nb 1\na{x=\"1\"} 1\n", 4),
            ("# TYPE h histogram\nh 1\n", 2),
            ("# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\n", 5),
            ("# TYPE h histogram\nh_bucket{le=\"1\"} 1\nh_sum 1\nh_count 1\n", 4),
            ("# TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 2\n", 4),
            ("# TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\nh_count 1\n", 3),
        ] {
            let error = Exposition::parse(text).expect_err(text);
            assert_eq!(error.line, line, "{text:?}: {error}");
        }
    }

    #[test]
    fn joined_series_have_their_instance_and_a_family_has_one_kind() {
        let mut all = Exposition::parse("# TYPE own gauge\nown 1\n# TYPE n_total counter\nn_total 5\n").unwrap();
        let one = Exposition::parse("# HELP n_total n\n# TYPE n_total counter\nn_total{k=\"v\"} 1\n").unwrap();
        let two = Exposition::parse("# TYPE n_total counter\nn_total{instance=\"x\"} 2\n# TYPE own counter\nown 3\n")
            .unwrap();
        assert_eq!(all.join("i\"2", two), ["own"]);
        assert!(all.join("i1", one).is_empty());
        let text = all.text();
        assert_eq!(
            text,
            "# HELP n_total n\n# TYPE n_total counter\nn_total 5\nn_total{instance=\"i\\\"2\",exported_instance=\"x\"} 2\n\
             n_total{instance=\"i1\",k=\"v\"} 1\n# TYPE own gauge\nown 1\n"
        );
        Exposition::parse(&text).unwrap();
    }
}
