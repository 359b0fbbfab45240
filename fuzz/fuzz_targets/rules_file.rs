//! Arbitrary strings as a rules file. They must be a valid configuration, or be rejected with
//! printable errors.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_config::Config;

fuzz_target!(|text: &str| {
    if let Err(mistakes) = Config::parse(text) {
        assert!(!mistakes.is_empty(), "an error has a message");
        assert!(
            mistakes
                .iter()
                .all(|mistake| !mistake.to_string().is_empty())
        );
    }
});
