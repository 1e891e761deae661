//! Dates for templates (`strftime_now`), in UTC.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Seconds since 1970; times before count as 1970.
pub(crate) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// Formats a time like C's `strftime`; the error names the unsupported conversion.
pub(crate) fn strftime(seconds: u64, format: &str) -> Result<String, String> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (year, month, day) = civil(days);
    let month_name = MONTHS[month - 1];
    // Remainders of 7 index DAYS whatever the width of usize.
    let weekday = DAYS[usize::try_from(days % 7).unwrap_or(0)];
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let conversion = chars.next().unwrap_or('%');
        let written = match conversion {
            'Y' => write!(out, "{year}"),
            'y' => write!(out, "{:02}", year % 100),
            'm' => write!(out, "{month:02}"),
            'd' => write!(out, "{day:02}"),
            'e' => write!(out, "{day:2}"),
            'B' => write!(out, "{month_name}"),
            'b' | 'h' => write!(out, "{}", &month_name[..3]),
            'A' => write!(out, "{weekday}"),
            'a' => write!(out, "{}", &weekday[..3]),
            'H' => write!(out, "{hour:02}"),
            'I' => write!(out, "{hour12:02}"),
            'M' => write!(out, "{minute:02}"),
            'S' => write!(out, "{second:02}"),
            'p' => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            'F' => write!(out, "{year}-{month:02}-{day:02}"),
            'T' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            '%' => write!(out, "%"),
            other => return Err(format!("strftime_now does not know %{other}")),
        };
        written.map_err(|e| e.to_string())?;
    }
    Ok(out)
}

/// Year, month and day of the Gregorian calendar, `days` after 1 January 1970. Linear in years: about a microsecond.
fn civil(mut days: u64) -> (u64, usize, u64) {
    let mut year = 1970;
    let leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = if leap(year) { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        let show = |seconds| strftime(seconds, "%a %A %d %b %B %Y %F %T %I %p %y %e %%").unwrap();
        assert_eq!(show(0), "Thu Thursday 01 Jan January 1970 1970-01-01 00:00:00 12 AM 70  1 %");
        assert_eq!(show(951_782_400), "Tue Tuesday 29 Feb February 2000 2000-02-29 00:00:00 12 AM 00 29 %");
        assert_eq!(show(1_735_689_599), "Tue Tuesday 31 Dec December 2024 2024-12-31 23:59:59 11 PM 24 31 %");
        assert_eq!(strftime(0, "%Q").unwrap_err(), "strftime_now does not know %Q");
    }
}
