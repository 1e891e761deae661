//! Text tables: columns as wide as their widest cell, no trailing spaces.

use std::fmt;

/// Rows under a heading.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self { rows: vec![titles.iter().map(|t| (*t).to_owned()).collect()] }
    }

    /// Adds a row with one cell per title.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.rows[0].len());
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |c: usize| self.rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        for row in &self.rows {
            let padded = row.iter().zip(&widths).map(|(text, width)| format!("{text:<width$}"));
            writeln!(f, "{}", padded.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["ID", "NAME"]);
        table.row(vec!["1000".to_owned(), "ä".to_owned()]);
        table.row(vec!["2".to_owned(), "instance".to_owned()]);
        assert_eq!(table.to_string(), "ID    NAME\n1000  ä\n2     instance\n");
    }
}
