//! GGUF files of a model on the hub: which there are, and the one that a name picks.
//!
//! Models are published in several formats side by side, a large one in parts (`NAME-00001-of-00003.gguf`). A name picks one by its
//! file, or by the tag at the end of the file's name, such as `Q4_K_M`. Names of files are the hub's, and untrusted.

use std::path::{Path, PathBuf};

const END: &str = ".gguf";
/// Files that a message lists at most.
const LISTED_MAX: usize = 40;
/// Longest name of a file, in bytes.
pub(crate) const FILE_BYTES_MAX: usize = 256;
/// Folders within each other that are looked into.
const DEPTH_MAX: usize = 3;
/// Files of a snapshot that are looked at.
const FILES_MAX: usize = 4096;
/// What names of files begin with that hold no model of their own: projectors of images.
const OTHERS: [&str; 1] = ["mmproj"];

/// A model in one file, or in the parts of a split one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GgufModel {
    /// Its files in their order; at least one.
    pub(crate) files: Vec<String>,
    /// Parts that its name counts.
    parts: usize,
}

/// A part's place in a split model: what all names begin with, the number from 1, and the count.
fn part(file: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = file.strip_suffix(END)?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let (number, count) = (digits(number).then(|| number.parse().ok())??, digits(count).then(|| count.parse().ok())??);
    Some((stem, number, count))
}

/// Whether a path within a repository has plain components only, which are the same in a URL.
fn is_plain(file: &str) -> bool {
    let component = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| !c.is_control() && !matches!(c, '\\' | ':' | '%' | '?' | '#'))
    };
    file.len() <= FILE_BYTES_MAX && file.split('/').count() <= DEPTH_MAX + 1 && file.split('/').all(component)
}

impl GgufModel {
    /// The models among `files`, in the order of their names.
    pub(crate) fn all<'a>(files: impl IntoIterator<Item = &'a str>) -> Vec<Self> {
        let is_model = |file: &str| {
            let name = file.rsplit('/').next().unwrap_or(file);
            file.ends_with(END) && is_plain(file) && !OTHERS.iter().any(|other| name.starts_with(other))
        };
        let mut files: Vec<&str> = files.into_iter().filter(|file| is_model(file)).collect();
        files.sort_unstable();
        files.dedup();
        let mut models: Vec<Self> = Vec::new();
        for file in files {
            let (parts, first) = part(file).map_or((1, true), |(_, number, count)| (count, number == 1));
            match models.last_mut() {
                Some(last) if !first && last.takes(file) => last.files.push(file.to_owned()),
                _ => models.push(Self { files: vec![file.to_owned()], parts }),
            }
        }
        models
    }

    /// Whether a file is a later part.
    fn takes(&self, file: &str) -> bool {
        let last = self.files.last().and_then(|last| part(last));
        last.zip(part(file))
            .is_some_and(|(last, file)| (last.0, last.2) == (file.0, file.2) && last.1 < file.1 && file.1 <= file.2)
    }

    /// Whether all parts are there.
    pub(crate) fn is_whole(&self) -> bool {
        self.files.len() == self.parts
    }

    /// The name without folders, number and end.
    fn stem(&self) -> &str {
        let file = &self.files[0];
        let path = part(file).map_or_else(|| file.strip_suffix(END).unwrap_or(file), |(stem, ..)| stem);
        path.rsplit('/').next().unwrap_or(path)
    }

    /// How a message calls the model.
    fn shown(&self) -> String {
        let missing = if self.is_whole() { "" } else { ", not all are there" };
        match self.parts {
            0 | 1 => self.files[0].clone(),
            parts => format!("{} ({parts} files{missing})", self.files[0]),
        }
    }
}

/// Whether `stem` has `tag` as a word of its own: at the end, or anywhere.
fn has_tag(stem: &str, tag: &str, at_end: bool) -> bool {
    let (stem, tag) = (stem.to_ascii_lowercase(), tag.to_ascii_lowercase());
    stem.match_indices(&tag).any(|(at, _)| {
        let (before, after) = (stem[..at].chars().next_back(), stem[at + tag.len()..].chars().next());
        let begins = before.is_none_or(|c| matches!(c, '-' | '.' | '_'));
        begins && (after.is_none() || !at_end && matches!(after, Some('-' | '.')))
    })
}

/// The models that a tag or the name of a file picks; all without one.
fn picked<'a>(models: &'a [GgufModel], wanted: Option<&str>) -> Vec<&'a GgufModel> {
    let Some(wanted) = wanted else { return models.iter().collect() };
    let by = |picks: &dyn Fn(&GgufModel) -> bool| models.iter().filter(|model| picks(model)).collect::<Vec<_>>();
    let rules: [&dyn Fn(&GgufModel) -> bool; 3] = [
        &|model| model.files.iter().any(|file| file == wanted || file.rsplit('/').next() == Some(wanted)),
        &|model| has_tag(model.stem(), wanted, true),
        &|model| has_tag(model.stem(), wanted, false),
    ];
    rules.iter().map(|rule| by(rule)).find(|found| !found.is_empty()).unwrap_or_default()
}

/// The one model that `wanted` picks, a tag or the name of a file. Without it, the only one that there is.
///
/// # Errors
/// A problem and a hint with the models that there are, if none or several are picked.
pub(crate) fn choose(models: &[GgufModel], wanted: Option<&str>) -> Result<GgufModel, (String, String)> {
    let found = picked(models, wanted);
    let listed = |models: &[&GgufModel]| {
        let mut names: Vec<String> = models.iter().take(LISTED_MAX).map(|model| model.shown()).collect();
        if models.len() > LISTED_MAX {
            names.push(format!("and {} others", models.len() - LISTED_MAX));
        }
        names.join("\n  ")
    };
    match (found.as_slice(), wanted) {
        ([model], _) if model.is_whole() => Ok((*model).clone()),
        ([model], _) => {
            let count = model.files.len();
            Err((
                format!("it has {count} of the {} files of {}", model.parts, model.stem()),
                "ask its author".to_owned(),
            ))
        }
        ([], Some(wanted)) => {
            let all = listed(&models.iter().collect::<Vec<_>>());
            Err((format!("no GGUF file is named {wanted}, and none has it as a tag"), format!("there are\n  {all}")))
        }
        (several, _) => Err((
            match wanted {
                Some(wanted) => format!("{} GGUF files have the tag {wanted}", several.len()),
                None => format!("it has {} GGUF files", several.len()),
            },
            format!("name one, as org/name:TAG or org/name/FILE; there are\n  {}", listed(several)),
        )),
    }
}

/// Paths of the files in a snapshot, relative to it, with `/` between folders.
pub(crate) fn files_of(snapshot: &Path) -> Vec<String> {
    let (mut files, mut folders) = (Vec::new(), vec![(PathBuf::new(), 0)]);
    while let Some((folder, depth)) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(snapshot.join(&folder)) else { continue };
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), folder.join(entry.file_name()));
            // A link to a file that is not there does not exist.
            if path.is_dir() && depth < DEPTH_MAX {
                folders.push((name, depth + 1));
            } else if path.is_file() && files.len() < FILES_MAX {
                let parts = name.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>();
                files.push(parts.join("/"));
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 14] = [
        "README.md",
        "mmproj-model-f16.gguf",
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m-UD-Q4_K_XL.gguf",
        "m-Q6_K-imat.gguf",
        "Q8_0/m-Q8_0-00001-of-00002.gguf",
        "Q8_0/m-Q8_0-00002-of-00002.gguf",
        "m-F16-00001-of-00003.gguf",
        "m-F16-00003-of-00003.gguf",
        "../m-Q2_K.gguf",
        "a/.b/m-Q2_K.gguf",
        "%2e%2e/m-Q2_K.gguf",
        "m-Q2_K.gguf?download=1.gguf",
    ];

    fn pick(wanted: Option<&str>) -> Result<Vec<String>, (String, String)> {
        choose(&GgufModel::all(FILES), wanted).map(|model| model.files)
    }

    #[test]
    fn tags_and_files_pick_one() {
        for (wanted, file) in [
            ("Q4_K_M", "m-Q4_K_M.gguf"),
            ("q4_k_m", "m-Q4_K_M.gguf"),
            ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
            ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
            ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
            ("Q6_K", "m-Q6_K-imat.gguf"),
        ] {
            assert_eq!(pick(Some(wanted)), Ok(vec![file.to_owned()]), "{wanted}");
        }
        let split = Ok(vec![FILES[6].to_owned(), FILES[7].to_owned()]);
        for wanted in ["Q8_0", "m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf"] {
            assert_eq!(pick(Some(wanted)), split, "{wanted}");
        }
    }

    #[test]
    fn what_picks_none_or_several_lists_what_there_is() {
        let (problem, hint) = pick(Some("Q4_K")).unwrap_err();
        assert_eq!(problem, "no GGUF file is named Q4_K, and none has it as a tag");
        assert!(
            hint.contains("\n  m-Q4_K_M.gguf\n") && hint.contains("m-Q8_0-00001-of-00002.gguf (2 files)"),
            "{hint}"
        );
        assert!(!hint.contains("mmproj") && !hint.contains("Q2_K"), "projectors and unsafe names are left out: {hint}");
        let (problem, hint) = pick(None).unwrap_err();
        assert!(problem.contains("GGUF files") && hint.contains("org/name:TAG"), "{problem} {hint}");
        let (problem, _) = pick(Some("F16")).unwrap_err();
        assert_eq!(problem, "it has 2 of the 3 files of m-F16");
        let twice = GgufModel::all(["a-Q4_0.gguf", "b-Q4_0.gguf"]);
        let (problem, hint) = choose(&twice, Some("Q4_0")).unwrap_err();
        assert!(problem == "2 GGUF files have the tag Q4_0" && hint.ends_with("a-Q4_0.gguf\n  b-Q4_0.gguf"), "{hint}");
        let many: Vec<String> = (0..100).map(|i| format!("m{i:03}.gguf")).collect();
        let (_, hint) = choose(&GgufModel::all(many.iter().map(String::as_str)), None).unwrap_err();
        assert!(hint.ends_with("and 60 others"), "{hint}");
    }
}
