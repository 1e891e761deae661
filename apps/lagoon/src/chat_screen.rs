//! What `lagoon chat` shows of an answer while it arrives: the text as it is, or as Markdown.
//!
//! Markdown is shown by blocks. The last block changes with every piece (a line may turn out to be a heading), so its lines are drawn
//! again, as far as they are on the screen; blocks before it stay.

use crate::markdown;
use std::io::{self, Write};

/// Columns and rows where the terminal's size is unknown.
const SIZE_UNKNOWN: (usize, usize) = (80, 24);
/// Fewest columns and rows that count as a size.
const SIZE_MIN: (usize, usize) = (20, 4);

/// Columns and rows of the terminal.
fn terminal_size() -> (usize, usize) {
    match terminal_size::terminal_size() {
        // The last column stays free: terminals differ in what they do behind it.
        Some((columns, rows)) => {
            (usize::from(columns.0.saturating_sub(1)).max(SIZE_MIN.0), usize::from(rows.0).max(SIZE_MIN.1))
        }
        None => SIZE_UNKNOWN,
    }
}

/// How answers are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// As they arrive.
    Plain,
    /// As Markdown on a terminal, of this size if not its own.
    Markdown(Option<(usize, usize)>),
}

/// An answer in the making.
#[derive(Debug)]
pub(crate) struct Screen<'a, W> {
    out: &'a mut W,
    look: Look,
    /// Whether the reasoning is shown now.
    reasons: bool,
    /// Text of the blocks that are not final.
    text: String,
    /// Lines of them on the screen; the cursor is in the line below.
    shown: Vec<String>,
    /// Whether blocks of this part stand above.
    follows: bool,
    /// The last character of plain text.
    last: Option<char>,
}

impl<'a, W: Write> Screen<'a, W> {
    pub(crate) fn new(out: &'a mut W, look: Look) -> Self {
        Self { out, look, reasons: false, text: String::new(), shown: Vec::new(), follows: false, last: None }
    }

    /// Shows a piece of the reasoning before the answer.
    pub(crate) fn reason(&mut self, piece: &str) -> io::Result<()> {
        self.reasons = true;
        self.show(piece)
    }

    /// Shows a piece of the answer.
    pub(crate) fn say(&mut self, piece: &str) -> io::Result<()> {
        if std::mem::take(&mut self.reasons) {
            match self.look {
                Look::Plain => self.out.write_all(b"\n\n")?,
                Look::Markdown(_) => {
                    self.draw(true, true)?;
                    (self.text, self.follows) = (String::new(), false);
                    self.out.write_all(b"\n")?;
                }
            }
        }
        self.show(piece)
    }

    fn show(&mut self, piece: &str) -> io::Result<()> {
        match self.look {
            Look::Plain => {
                self.last = piece.chars().last().or(self.last);
                self.out.write_all(piece.as_bytes())?;
            }
            Look::Markdown(_) => {
                self.text.push_str(piece);
                self.draw(self.reasons, false)?;
            }
        }
        self.out.flush()
    }

    /// Ends the answer, also one that was interrupted: the cursor is at the beginning of a line.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        match (self.look, self.last) {
            (Look::Plain, None | Some('\n')) => {}
            (Look::Plain, Some(_)) => self.out.write_all(b"\n")?,
            (Look::Markdown(_), _) => self.draw(self.reasons, true)?,
        }
        self.out.flush()
    }

    /// Draws what has changed; blocks that are final are forgotten, all of them if the text has ended.
    fn draw(&mut self, dim: bool, ended: bool) -> io::Result<()> {
        let Look::Markdown(size) = self.look else { return Ok(()) };
        let (columns, rows) = size.unwrap_or_else(terminal_size);
        let end = if ended { self.text.len() } else { markdown::last_block(&self.text) };
        let last = self.text.split_off(end);
        let stays = self.render(columns, dim);
        self.text = last;
        self.follows |= !stays.is_empty();
        let changes = self.render(columns, dim);
        let lines = [stays.as_slice(), &changes].concat();
        self.redraw(&lines, rows)?;
        self.shown = changes;
        Ok(())
    }

    /// The lines of the text, with the empty line that parts it from a block above.
    fn render(&self, columns: usize, dim: bool) -> Vec<String> {
        let mut lines = markdown::render(&self.text, columns, dim);
        if self.follows && !lines.is_empty() {
            lines.insert(0, String::new());
        }
        lines
    }

    /// Replaces the lines shown by `lines`, from the first that differs.
    fn redraw(&mut self, lines: &[String], rows: usize) -> io::Result<()> {
        let same = self.shown.iter().zip(lines).take_while(|(a, b)| a == b).count();
        // Lines that have left the screen at the top cannot be drawn again.
        let from = same.max((self.shown.len() + 1).saturating_sub(rows));
        let up = self.shown.len().saturating_sub(from);
        let mut text = if up > 0 { format!("\x1b[{up}A\r\x1b[J") } else { String::new() };
        for line in lines.iter().skip(from) {
            text += line;
            text.push('\n');
        }
        self.out.write_all(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A terminal: the lines after a drawing.
    fn play(bytes: &[u8]) -> Vec<String> {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let (mut lines, mut at) = (vec![String::new()], 0);
        let mut rest = text.as_str();
        while let Some(c) = rest.chars().next() {
            if let Some(code) = rest.strip_prefix("\x1b[") {
                let end = code.find(|c: char| c.is_ascii_alphabetic()).unwrap();
                match &code[end..=end] {
                    "A" => at -= code[..end].parse::<usize>().unwrap(),
                    "J" => {
                        lines.truncate(at + 1);
                        lines[at].clear();
                    }
                    _ => {}
                }
                rest = &code[end + 1..];
                continue;
            }
            match c {
                '\n' => {
                    at += 1;
                    if at == lines.len() {
                        lines.push(String::new());
                    }
                }
                '\r' => {}
                c => lines[at].push(c),
            }
            rest = &rest[c.len_utf8()..];
        }
        assert_eq!(lines.pop().as_deref(), Some(""), "the cursor is in an empty line");
        lines
    }

    const TEXT: &str = "# Title\n\nSome **bold** words that need more than one line of this terminal.\n\n- one\n- two\n\n```\ncode\n\nmore\n```\n\nThe end.";

    /// However the text is cut, it looks as if it had been rendered at once.
    #[test]
    fn pieces_add_up() {
        for size in [1, 2, 3, 7, 20, TEXT.len()] {
            let mut out = Vec::new();
            let mut screen = Screen::new(&mut out, Look::Markdown(Some((40, 50))));
            let characters: Vec<char> = TEXT.chars().collect();
            for piece in characters.chunks(size) {
                screen.say(&piece.iter().collect::<String>()).unwrap();
            }
            screen.end().unwrap();
            let mut whole = Vec::new();
            let mut at_once = Screen::new(&mut whole, Look::Markdown(Some((40, 50))));
            at_once.say(TEXT).unwrap();
            at_once.end().unwrap();
            assert_eq!(play(&out), play(&whole), "pieces of {size}");
            assert!(play(&out).contains(&"Some bold words that need more than one".to_owned()), "{:?}", play(&out));
        }
    }

    #[test]
    fn no_more_lines_are_drawn_again_than_the_screen_has() {
        let mut out = Vec::new();
        let mut screen = Screen::new(&mut out, Look::Markdown(Some((20, 6))));
        for word in "many words in one paragraph, much longer than the terminal is high and wide "
            .repeat(8)
            .split_inclusive(' ')
        {
            screen.say(word).unwrap();
        }
        screen.end().unwrap();
        let text = String::from_utf8(out).unwrap();
        let ups =
            text.match_indices("\x1b[").filter_map(|(at, _)| text[at + 2..].split_once('A')?.0.parse::<usize>().ok());
        assert!(ups.max().is_some_and(|up| up < 6), "{text:?}");
    }

    #[test]
    fn reasoning_stands_apart() {
        let mut out = Vec::new();
        let mut screen = Screen::new(&mut out, Look::Markdown(Some((40, 50))));
        screen.reason("hm").unwrap();
        screen.say("yes").unwrap();
        screen.end().unwrap();
        assert!(String::from_utf8_lossy(&out).contains("\x1b[2mhm\x1b[0m"));
        assert_eq!(play(&out), ["hm", "", "yes"]);
        let mut out = Vec::new();
        let mut screen = Screen::new(&mut out, Look::Plain);
        screen.reason("hm").unwrap();
        screen.say("yes").unwrap();
        screen.end().unwrap();
        assert_eq!(out, b"hm\n\nyes\n");
    }
}
