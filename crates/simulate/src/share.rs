//! Shares of a whole, as given in command-line options.

use std::{fmt, str::FromStr};

/// A share from 0 to 100 percent, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

impl Share {
    const WHOLE: u32 = 1_000_000;

    /// Returns true if `part` exceeds this share of `whole`.
    #[must_use]
    pub fn is_exceeded(self, part: u64, whole: u64) -> bool {
        u128::from(part) * u128::from(Self::WHOLE) > u128::from(whole) * u128::from(self.0)
    }

    /// Returns this share of `whole`, rounded down.
    #[must_use]
    pub(crate) fn of(self, whole: u64) -> u64 {
        let part = u128::from(whole) * u128::from(self.0) / u128::from(Self::WHOLE);
        u64::try_from(part).unwrap_or(whole)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected a share such as 0.1%, got \"{text}\"");
        let number = text.strip_suffix('%').ok_or_else(expected)?.trim();
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let is_number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
        let is_valid = !whole.is_empty() && is_number(whole) && is_number(fraction);
        if !is_valid || fraction.len() > 4 {
            return Err(expected());
        }
        let millionths: u32 = format!("{whole}{fraction:0<4}")
            .parse()
            .map_err(|_| expected())?;
        if millionths > Self::WHOLE {
            return Err(format!("{}; the maximum is 100%", expected()));
        }
        Ok(Self(millionths))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, fraction) = (self.0 / 10_000, self.0 % 10_000);
        if fraction == 0 {
            return write!(f, "{whole}%");
        }
        let fraction = format!("{fraction:04}");
        write!(f, "{whole}.{}%", fraction.trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_exact() {
        for (text, shown) in [
            ("0%", "0%"),
            ("0.1%", "0.1%"),
            ("12.5 %", "12.5%"),
            ("100%", "100%"),
        ] {
            assert_eq!(text.parse::<Share>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "%",
            "1",
            "-1%",
            "1e2%",
            "100.1%",
            "0.00001%",
            "999999999999%",
            ".5%",
        ] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
        let share: Share = "0.1%".parse().unwrap();
        assert!(!share.is_exceeded(1, 1_000) && share.is_exceeded(1, 999));
        assert_eq!(
            (share.of(999), share.of(1_000), share.of(u64::MAX)),
            (0, 1, u64::MAX / 1_000)
        );
        let none: Share = "0%".parse().unwrap();
        assert!(none.is_exceeded(1, u64::MAX) && !none.is_exceeded(0, 0));
    }
}
