//! Tests of the section `denials` in the rules file.

use tidegate_config::{Config, DenialsConfig};

fn read(text: &str) -> DenialsConfig {
    Config::parse(text).unwrap().denials
}

#[test]
fn the_default_is_four_mebibytes_and_no_log() {
    let default = DenialsConfig {
        max_bytes: 4 << 20,
        log_percent: 0,
    };
    for text in ["", "denials: {}", "denials: {log: off, max_bytes: 4MiB}"] {
        assert_eq!(read(text), default, "{text}");
    }
    assert_eq!(read("denials: off").max_bytes, 0);
    let read = read("denials: {max_bytes: 256KiB, log: 5%}");
    assert_eq!((read.max_bytes, read.log_percent), (256 << 10, 5));
}

#[test]
fn mistakes_are_named_with_what_is_accepted() {
    for (text, expected) in [
        (
            "denials: on",
            "denials (line 1): expected off, or a map such as {max_bytes: 4MiB, log: 1%}",
        ),
        (
            "denials: {max_bytes: 255KiB}",
            "denials.max_bytes (line 1): must be 256KiB to 1GiB; to keep no denials, write `denials: off`",
        ),
        (
            "denials: {max_bytes: 2GiB}",
            "denials.max_bytes (line 1): must be 256KiB to 1GiB",
        ),
        (
            "denials: {log: 0%}",
            "denials.log (line 1): must be 1% to 100%, or off",
        ),
        (
            "denials: {log: 101%}",
            "denials.log (line 1): must be 1% to 100%, or off",
        ),
        (
            "denials: {log: yes}",
            "denials.log (line 1): expected a percentage such as 10%",
        ),
        (
            "denials: {max_byte: 1MiB}",
            "denials.max_byte (line 1): unknown key `max_byte`; did you mean `max_bytes`?",
        ),
    ] {
        let mistakes = Config::parse(text).unwrap_err();
        assert!(
            mistakes[0].to_string().starts_with(expected),
            "{mistakes:?}"
        );
    }
}
