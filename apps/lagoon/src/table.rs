//! Text tables: columns as wide as their widest cell, no trailing spaces. On a terminal that is too narrow, the columns that do not
//! fit stand in further tables below.

use std::fmt;
use std::io::stdout;

/// Spaces between two columns.
const GAP: usize = 2;

/// Rows under a heading.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    /// The first columns, which every part of the table has.
    keys: usize,
    /// Columns of the terminal; `None` without one.
    width_max: Option<usize>,
}

impl Table {
    /// A table for standard output, whose first column names its rows.
    pub(crate) fn new(titles: &[&str]) -> Self {
        let terminal = terminal_size::terminal_size_of(stdout()).map(|(width, _)| usize::from(width.0));
        Self { rows: vec![titles.iter().map(|t| (*t).to_owned()).collect()], keys: 1, width_max: terminal }
    }

    /// The same table, whose first `keys` columns name its rows.
    pub(crate) fn keyed(self, keys: usize) -> Self {
        Self { keys, ..self }
    }

    /// Adds a row with one cell per title.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.rows[0].len());
        self.rows.push(cells);
    }

    /// The columns of each part: as many as fit beside the first ones, at least one.
    fn parts(&self, widths: &[usize]) -> Vec<Vec<usize>> {
        let keys: Vec<usize> = (0..self.keys.min(widths.len())).collect();
        let mut parts = vec![keys.clone()];
        for column in self.keys..widths.len() {
            let with = |part: &[usize]| part.iter().chain([&column]).map(|c| widths[*c] + GAP).sum::<usize>() - GAP;
            let part = parts.last_mut().filter(|part| {
                part.len() == keys.len() || self.width_max.is_none_or(|width_max| with(part) <= width_max)
            });
            match part {
                Some(part) => part.push(column),
                None => parts.push(keys.iter().copied().chain([column]).collect()),
            }
        }
        parts
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |c: usize| self.rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        for (number, part) in self.parts(&widths).iter().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            for row in &self.rows {
                let padded = part.iter().map(|c| format!("{text:<width$}", text = row[*c], width = widths[*c] + GAP));
                writeln!(f, "{}", padded.collect::<String>().trim_end())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table { width_max: None, ..Table::new(&["ID", "NAME"]) };
        table.row(vec!["1000".to_owned(), "ä".to_owned()]);
        table.row(vec!["2".to_owned(), "instance".to_owned()]);
        assert_eq!(table.to_string(), "ID    NAME\n1000  ä\n2     instance\n");
    }

    #[test]
    fn columns_that_do_not_fit_stand_below() {
        let of = |width_max| {
            let mut table = Table { width_max, ..Table::new(&["ID", "NAME", "FREE", "BLOCKS", "RUN/WAIT"]).keyed(2) };
            table.row(["1", "one", "32", "32", "0/0"].map(str::to_owned).into());
            table.row(["2", "two", "7", "32", "1/12"].map(str::to_owned).into());
            table.to_string()
        };
        let whole = "ID  NAME  FREE  BLOCKS  RUN/WAIT\n1   one   32    32      0/0\n2   two   7     32      1/12\n";
        assert_eq!(of(None), whole);
        assert_eq!(of(Some(32)), whole);
        assert_eq!(
            of(Some(31)),
            "ID  NAME  FREE  BLOCKS\n1   one   32    32\n2   two   7     32\n\n\
             ID  NAME  RUN/WAIT\n1   one   0/0\n2   two   1/12\n"
        );
        // Never without a column of its own.
        assert_eq!(of(Some(1)).lines().filter(|line| line.starts_with("ID")).count(), 3);
    }
}
