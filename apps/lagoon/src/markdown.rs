//! Markdown on a terminal: from pulldown-cmark's events to lines of a width, wrapped at words.
//!
//! The text comes from a model: control characters, which could steer the terminal, are left out.

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// Fewest columns that text is wrapped to, however deep it is indented.
const COLUMNS_MIN: usize = 16;
const RESET: &str = "\x1b[0m";

/// How text is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Style {
    bold: bool,
    italic: bool,
    code: bool,
    strike: bool,
    heading: bool,
    dim: bool,
}

impl Style {
    fn codes(self) -> String {
        let all = [
            (self.bold || self.heading, "1"),
            (self.italic, "3"),
            (self.strike, "9"),
            (self.dim, "2"),
            (self.code, "36"),
            (self.heading, "35"),
        ];
        let codes: Vec<&str> = all.iter().filter(|(on, _)| *on).map(|(_, code)| *code).collect();
        if codes.is_empty() { String::new() } else { format!("\x1b[{}m", codes.join(";")) }
    }
}

/// A part of a line in one style.
#[derive(Clone, Debug)]
struct Piece {
    text: String,
    style: Style,
}

impl Piece {
    fn shown(&self) -> String {
        let codes = self.style.codes();
        if codes.is_empty() { self.text.clone() } else { format!("{codes}{}{RESET}", self.text) }
    }
}

/// The extensions of CommonMark that models use.
fn options() -> Options {
    Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS
}

/// The text without what a terminal would obey.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect::<String>().replace('\t', "    ")
}

/// Renders Markdown in lines of at most `columns` columns; `dim` for text beside the answer.
pub(crate) fn render(markdown: &str, columns: usize, dim: bool) -> Vec<String> {
    let markdown = printable(markdown);
    let mut page = Page { columns, base: Style { dim, ..Style::default() }, fresh: true, ..Page::default() };
    Parser::new_ext(&markdown, options()).for_each(|event| page.take(event));
    page.flush();
    page.lines
}

/// Where the last block of the document begins: the blocks before it no longer change when text follows.
pub(crate) fn last_block(markdown: &str) -> usize {
    let (mut depth, mut last) = (0u32, 0);
    for (event, range) in Parser::new_ext(markdown, options()).into_offset_iter() {
        match event {
            Event::End(_) => depth = depth.saturating_sub(1),
            _ if depth == 0 => {
                last = range.start;
                depth += u32::from(matches!(event, Event::Start(_)));
            }
            Event::Start(_) => depth += 1,
            _ => {}
        }
    }
    last
}

/// A page in the making.
#[derive(Debug, Default)]
struct Page {
    columns: usize,
    base: Style,
    lines: Vec<String>,
    /// Of the block at hand.
    pieces: Vec<Piece>,
    styles: Vec<Style>,
    /// Indentation of the blocks around: of lists and quotes.
    indents: Vec<String>,
    /// The next number of each list around; `None` of one with bullets.
    lists: Vec<Option<u64>>,
    /// An item's mark, until its first line.
    mark: Option<String>,
    /// No empty line before the next block: it is the first one here.
    fresh: bool,
    in_code: bool,
    cells: Vec<Vec<String>>,
}

impl Page {
    fn style(&self) -> Style {
        self.styles.last().copied().unwrap_or(self.base)
    }

    fn push_style(&mut self, change: impl FnOnce(&mut Style)) {
        let mut style = self.style();
        change(&mut style);
        self.styles.push(style);
    }

    fn say(&mut self, text: &str, style: Style) {
        self.pieces.push(Piece { text: text.to_owned(), style });
    }

    fn take(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.start(tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) if self.in_code => self.code(&text),
            Event::Code(text) => self.say(&text, Style { code: true, ..self.style() }),
            Event::SoftBreak => self.say(" ", self.style()),
            Event::HardBreak => self.say("\n", self.style()),
            Event::TaskListMarker(done) => self.say(if done { "[x] " } else { "[ ] " }, self.style()),
            Event::Rule => {
                self.gap();
                self.lines.push(format!("{}{}", self.indents.concat(), "─".repeat(self.columns.min(40))));
            }
            Event::Text(text)
            | Event::Html(text)
            | Event::InlineHtml(text)
            | Event::FootnoteReference(text)
            | Event::InlineMath(text)
            | Event::DisplayMath(text) => self.say(&text, self.style()),
        }
    }

    fn start(&mut self, tag: Tag<'_>) {
        match tag {
            Tag::Paragraph | Tag::HtmlBlock => self.gap(),
            Tag::Heading { level, .. } => {
                self.gap();
                self.push_style(|style| style.heading = true);
                if level >= HeadingLevel::H3 {
                    self.push_style(|style| *style = Style { heading: false, bold: true, ..*style });
                }
            }
            Tag::BlockQuote(_) => {
                self.gap();
                self.indents.push("│ ".to_owned());
                self.fresh = true;
            }
            Tag::CodeBlock(kind) => {
                self.gap();
                self.in_code = true;
                if let CodeBlockKind::Fenced(language) = kind
                    && !language.is_empty()
                {
                    self.say(&language, Style { dim: true, ..self.base });
                    self.flush();
                }
            }
            Tag::List(first) => {
                self.flush();
                if self.lists.is_empty() {
                    self.gap();
                }
                self.lists.push(first);
                self.fresh = true;
            }
            Tag::Item => self.item(),
            Tag::Emphasis => self.push_style(|style| style.italic = true),
            Tag::Strong => self.push_style(|style| style.bold = true),
            Tag::Strikethrough => self.push_style(|style| style.strike = true),
            Tag::Table(_) => self.gap(),
            Tag::TableHead | Tag::TableRow => self.cells.push(Vec::new()),
            _ => {}
        }
    }

    fn item(&mut self) {
        self.flush();
        self.fresh = true;
        let mark = match self.lists.last_mut() {
            Some(Some(number)) => {
                let mark = format!("{number}. ");
                *number = number.saturating_add(1);
                mark
            }
            _ => "• ".to_owned(),
        };
        self.indents.push(" ".repeat(mark.width()));
        self.mark = Some(mark);
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Paragraph | TagEnd::HtmlBlock => self.flush(),
            TagEnd::Heading(level) => {
                self.flush();
                self.styles.pop();
                if level >= HeadingLevel::H3 {
                    self.styles.pop();
                }
            }
            TagEnd::BlockQuote(_) => {
                self.flush();
                self.indents.pop();
                self.fresh = false;
            }
            TagEnd::CodeBlock => self.in_code = false,
            TagEnd::List(_) => {
                self.lists.pop();
                self.fresh = false;
            }
            TagEnd::Item => {
                self.flush();
                self.indents.pop();
                // An item without text.
                if let Some(mark) = self.mark.take() {
                    self.lines.push(format!("{}{}", self.indents.concat(), mark.trim_end()));
                }
            }
            TagEnd::Emphasis | TagEnd::Strong | TagEnd::Strikethrough => drop(self.styles.pop()),
            TagEnd::TableCell => {
                let cell = std::mem::take(&mut self.pieces).into_iter().map(|piece| piece.text).collect();
                if let Some(row) = self.cells.last_mut() {
                    row.push(cell);
                }
            }
            TagEnd::Table => self.table(),
            _ => {}
        }
    }

    /// An empty line before a block that follows another.
    fn gap(&mut self) {
        if !std::mem::replace(&mut self.fresh, false) {
            self.lines.push(self.indents.concat().trim_end().to_owned());
        }
    }

    /// The columns that the indentation leaves.
    fn room(&self) -> usize {
        let taken: usize = self.indents.iter().map(|indent| indent.width()).sum();
        self.columns.saturating_sub(taken).max(COLUMNS_MIN)
    }

    /// Adds a line, behind the item's mark if it is the first one.
    fn line(&mut self, text: &str) {
        let mut indents = self.indents.clone();
        if let (Some(mark), Some(last)) = (self.mark.take(), indents.last_mut()) {
            *last = mark;
        }
        self.lines.push(format!("{}{text}", indents.concat()).trim_end().to_owned());
    }

    /// Ends a block of running text.
    fn flush(&mut self) {
        let pieces = std::mem::take(&mut self.pieces);
        if pieces.iter().any(|piece| !piece.text.trim().is_empty()) {
            wrap(&pieces, self.room()).iter().for_each(|line| self.line(line));
            self.fresh = false;
        }
    }

    /// Lines of a code block: cut at the edge, not wrapped at words.
    fn code(&mut self, text: &str) {
        let style = Style { code: true, ..self.base };
        for line in text.lines() {
            for part in cut(&format!("  {line}"), self.room()) {
                self.line(&Piece { text: part, style }.shown());
            }
        }
        self.fresh = false;
    }

    fn table(&mut self) {
        let rows = std::mem::take(&mut self.cells);
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell = |row: &Vec<String>, at: usize| row.get(at).map_or("", |cell| cell.trim()).to_owned();
        let widths: Vec<usize> =
            (0..columns).map(|at| rows.iter().map(|row| cell(row, at).width()).max().unwrap_or(0)).collect();
        let fits = widths.iter().sum::<usize>() + 3 * columns.saturating_sub(1) <= self.room();
        for (number, row) in rows.iter().enumerate() {
            let pad = |at: usize| " ".repeat(if fits { widths[at] - cell(row, at).width() } else { 0 });
            let text: Vec<String> = (0..columns).map(|at| cell(row, at) + &pad(at)).collect();
            let style = Style { bold: number == 0, ..self.base };
            let text = text.join(" │ ");
            // A padded row is one line as it is.
            let lines =
                if fits { vec![Piece { text, style }.shown()] } else { wrap(&[Piece { text, style }], self.room()) };
            lines.iter().for_each(|line| self.line(line));
            if number == 0 && fits {
                let rule: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
                self.line(&rule.join("─┼─"));
            }
        }
        self.fresh = false;
    }
}

/// Parts of `text` of at most `columns` columns.
fn cut(text: &str, columns: usize) -> Vec<String> {
    let (mut parts, mut part, mut width) = (Vec::new(), String::new(), 0);
    for c in text.chars() {
        let wide = c.width().unwrap_or(0);
        if width + wide > columns {
            parts.push(std::mem::take(&mut part));
            width = 0;
        }
        part.push(c);
        width += wide;
    }
    parts.push(part);
    parts
}

/// Lines of at most `columns` columns, broken between words, and inside of words that are longer.
fn wrap(pieces: &[Piece], columns: usize) -> Vec<String> {
    let (mut lines, mut line, mut used) = (Vec::new(), String::new(), 0);
    for word in words(pieces) {
        let Word::Of(parts) = word else {
            lines.push(std::mem::take(&mut line));
            used = 0;
            continue;
        };
        let width: usize = parts.iter().map(|part| part.text.width()).sum();
        if used > 0 && used + 1 + width > columns {
            lines.push(std::mem::take(&mut line));
            used = 0;
        } else if used > 0 {
            line.push(' ');
            used += 1;
        }
        for part in parts {
            let room = columns.saturating_sub(used).max(1);
            let (first, rest) = match part.text.width() > room {
                true => (cut(&part.text, room).remove(0), part.text.clone()),
                false => (part.text.clone(), String::new()),
            };
            line += &Piece { text: first.clone(), ..part }.shown();
            used += first.width();
            for more in rest.strip_prefix(first.as_str()).map(|rest| cut(rest, columns)).unwrap_or_default() {
                if !more.is_empty() {
                    lines.push(std::mem::take(&mut line));
                    used = more.width();
                    line += &Piece { text: more, ..part }.shown();
                }
            }
        }
    }
    lines.push(line);
    lines
}

/// A word, whose parts may have several styles, or a line break.
enum Word {
    Of(Vec<Piece>),
    Break,
}

fn words(pieces: &[Piece]) -> Vec<Word> {
    let (mut words, mut word) = (Vec::new(), Vec::new());
    for Piece { text, style } in pieces {
        for part in text.split_inclusive(char::is_whitespace) {
            let bare = part.trim_end();
            if !bare.is_empty() {
                word.push(Piece { text: bare.to_owned(), style: *style });
            }
            if bare.len() < part.len() && !word.is_empty() {
                words.push(Word::Of(std::mem::take(&mut word)));
            }
            if part.ends_with('\n') {
                words.push(Word::Break);
            }
        }
    }
    if !word.is_empty() {
        words.push(Word::Of(word));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines without styles.
    fn plain(markdown: &str, columns: usize) -> Vec<String> {
        let mut lines = render(markdown, columns, false);
        for line in &mut lines {
            while let Some(at) = line.find('\x1b') {
                let end = at + line[at..].find('m').unwrap();
                line.replace_range(at..=end, "");
            }
        }
        lines
    }

    #[test]
    fn text_is_wrapped_at_words() {
        let text = "The **quick brown** fox\njumps over `the lazy` dog.";
        assert_eq!(plain(text, 20), ["The quick brown fox", "jumps over the lazy", "dog."]);
        assert_eq!(plain(text, 200), ["The quick brown fox jumps over the lazy dog."]);
        assert_eq!(plain(&"x".repeat(40), 16), ["x".repeat(16), "x".repeat(16), "x".repeat(8)]);
        assert_eq!(plain("one two  \nthree", 80), ["one two", "three"]);
        // Of two columns each.
        assert_eq!(plain("你好你好你好你好你好", 16), ["你好你好你好你好", "你好"]);
    }

    #[test]
    fn blocks_are_shown_as_such() {
        let text = "# Title\nText.\n\n- one\n- two words\n  1. inner\n  2. second\n- [x] done\n\n> quoted\n> text\n\n```rust\nfn main() {}\n  x\n```\nend";
        let lines = plain(text, 80);
        let expected = [
            "Title",
            "",
            "Text.",
            "",
            "• one",
            "• two words",
            "  1. inner",
            "  2. second",
            "• [x] done",
            "",
            "│ quoted text",
            "",
            "rust",
            "  fn main() {}",
            "    x",
            "",
            "end",
        ];
        assert_eq!(lines, expected);
        assert_eq!(plain("- a b c d e f g h i j", 16), ["• a b c d e f g h", "  i j"].map(str::to_owned));
    }

    #[test]
    fn tables_are_aligned_where_they_fit() {
        let text = "| a | long |\n|---|---|\n| 1 | 2 |\n";
        assert_eq!(plain(text, 80), ["a │ long", "──┼─────", "1 │ 2"]);
    }

    #[test]
    fn styles_are_closed_on_every_line() {
        let lines = render("**bold text over lines** and `code`", 16, false);
        for line in &lines {
            assert_eq!(line.matches('\x1b').count() % 2, 0, "{line:?}");
        }
        assert!(lines[0].contains("\x1b[1mbold\x1b[0m"), "{lines:?}");
        assert_eq!(render("x", 16, true), ["\x1b[2mx\x1b[0m"]);
    }

    #[test]
    fn a_model_does_not_steer_the_terminal() {
        let lines = render("a\x1b[2Jb\x07 `\x1b]0;t\x07`\r\n\n```\n\x1b[31mred\n```", 80, false);
        let text = lines.join("\n");
        assert!(
            !text.contains("\x1b[2J")
                && !text.contains('\x07')
                && !text.contains("\x1b]")
                && !text.contains("\x1b[31m"),
            "{text:?}"
        );
        assert!(text.contains("a[2Jb"), "{text:?}");
    }

    #[test]
    fn blocks_before_the_last_are_final() {
        assert_eq!(last_block("one para"), 0);
        assert_eq!(last_block("one\n\ntwo"), 5);
        assert_eq!(last_block("- a\n\n- b\n"), 0);
        assert_eq!(last_block("a\n\n```\nx\n\ny"), 3);
        assert_eq!(last_block("a\n\n---\n\nb"), 8);
    }

    /// Every text is rendered to lines that fit, whatever it is.
    #[test]
    fn lines_fit() {
        let text = "# A heading that is rather long for it\n\n> - nested **bold words `and code` in** a quote\n>   more\n\n1. x\n\n   para\n\n| a | b |\n|-|-|\n| some longer cell text | another one that does not fit |\n\n```\na line of code that is longer than the screen is wide, by far\n```\n***\n<b>html</b> ~~gone~~ https://example.org/a/rather/long/address/that/does/not/fit";
        for columns in [20, 40, 80] {
            for end in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
                for line in plain(&text[..end], columns) {
                    assert!(line.width() <= columns.max(COLUMNS_MIN + 4), "{columns}: {line}");
                }
            }
        }
    }
}
