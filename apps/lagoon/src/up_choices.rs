//! What `lagoon up` chose and why, in three lines: backend, KV memory, instances.

/// Where the number of instances comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    Default,
    /// By --instances.
    Given,
    /// By --prefill and --decode.
    Workers {
        prefill: u16,
        decode: u16,
    },
}

/// The choices.
#[derive(Clone, Debug)]
pub(crate) struct Choices<'a> {
    pub(crate) model: &'a str,
    pub(crate) backend: &'a str,
    pub(crate) backend_because: &'a str,
    /// The instances' devices, each once.
    pub(crate) devices: Vec<String>,
    /// Of each instance.
    pub(crate) kv_tokens: Vec<u64>,
    pub(crate) kv_because: &'a str,
    pub(crate) count: Count,
}

impl Choices<'_> {
    /// One line each.
    pub(crate) fn lines(&self) -> [String; 3] {
        let several = if self.devices.len() > 1 { format!("{} devices: ", self.devices.len()) } else { String::new() };
        let devices = self.devices.join(", ");
        let instances = self.kv_tokens.len();
        let (total, least) = (self.kv_tokens.iter().sum::<u64>(), self.kv_tokens.iter().min().unwrap_or(&0));
        let most = self.kv_tokens.iter().max().unwrap_or(&0);
        let each = if least == most { least.to_string() } else { format!("{least} to {most}") };
        let what = if instances == 1 { "instance" } else { "instances" };
        let why = match self.count {
            Count::Default => "the default: the fewest that lend KV memory to each other".to_owned(),
            Count::Given => "as --instances says".to_owned(),
            Count::Workers { prefill, decode } => {
                format!("{prefill} for prompts, {decode} for answers: --prefill, --decode")
            }
        };
        [
            format!("backend    {} on {several}{devices} ({})", self.backend, self.backend_because),
            format!("KV memory  {total} tokens, {each} an instance ({})", self.kv_because),
            format!("instances  {instances} {what} of {} ({why})", self.model),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices() -> Choices<'static> {
        Choices {
            model: "m",
            backend: "cpu",
            backend_because: "as --backend says",
            devices: vec!["a CPU".to_owned()],
            kv_tokens: vec![64, 64],
            kv_because: "4 contexts of 16 tokens",
            count: Count::Default,
        }
    }

    #[test]
    fn each_choice_has_its_reason() {
        let lines = choices().lines();
        assert_eq!(lines[0], "backend    cpu on a CPU (as --backend says)");
        assert_eq!(lines[1], "KV memory  128 tokens, 64 an instance (4 contexts of 16 tokens)");
        assert_eq!(lines[2], "instances  2 instances of m (the default: the fewest that lend KV memory to each other)");
    }

    #[test]
    fn instances_may_differ() {
        let devices = vec!["A".to_owned(), "B".to_owned()];
        let count = Count::Workers { prefill: 1, decode: 2 };
        let lines = Choices { devices, kv_tokens: vec![64, 32, 64], count, ..choices() }.lines();
        assert!(lines[0].contains("2 devices: A, B"), "{lines:?}");
        assert!(lines[1].contains("160 tokens, 32 to 64 an instance"), "{lines:?}");
        assert!(lines[2].contains("3 instances of m (1 for prompts, 2 for answers: --prefill, --decode)"), "{lines:?}");
        let one = Choices { kv_tokens: vec![64], count: Count::Given, ..choices() }.lines();
        assert!(one[2].contains("1 instance of m (as --instances says)"), "{one:?}");
    }
}
