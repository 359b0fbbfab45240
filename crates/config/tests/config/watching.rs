//! Tests of the sections `privacy` and `top` in the rules file, and of `listen.resp.top`.

use tidegate_config::{Config, KeyPrivacy, Password};
use tidegate_core::top::TopBounds;

use crate::mistakes;

#[test]
fn keys_are_plain_unless_they_are_hashed() {
    let privacy = |text: &str| Config::parse(text).unwrap().key_privacy;
    for text in ["", "privacy: {}", "privacy: {keys: plain}"] {
        assert_eq!(privacy(text), KeyPrivacy::Plain, "{text}");
    }
    let hashed = |secret| KeyPrivacy::Hashed { secret };
    assert_eq!(privacy("privacy: {keys: hashed}"), hashed(Password::None));
    assert_eq!(
        privacy("privacy: {keys: hashed, secret_env: KEY_SECRET}"),
        hashed(Password::Env("KEY_SECRET".into()))
    );
    let literal = privacy("privacy: {keys: hashed, secret: hunter2}");
    assert_eq!(literal, hashed(Password::Literal("hunter2".into())));
    assert!(!format!("{literal:?}").contains("hunter2"));
}

#[test]
fn the_bounds_of_the_lists_are_read() {
    let top = |text: &str| Config::parse(text).unwrap().top.0;
    let default = TopBounds {
        keys: 1_000,
        max_bytes: 32 << 20,
    };
    assert_eq!(top(""), Some(default));
    assert_eq!(top("top: {}"), Some(default));
    assert_eq!(top("top: off"), None);
    let small = TopBounds {
        keys: 50,
        max_bytes: 8 << 20,
    };
    assert_eq!(top("top: {keys: 50, max_bytes: 8MiB}"), Some(small));
}

#[test]
fn mistakes_are_reported() {
    for (text, expected) in [
        ("privacy: {keys: secret}", "privacy.keys (line 1): "),
        (
            "privacy: {keys: plain, secret_env: S}",
            "privacy.secret_env (line 1): has no effect without `keys: hashed`",
        ),
        (
            "privacy: {secret: s}",
            "privacy.secret (line 1): has no effect without `keys: hashed`",
        ),
        (
            "privacy: {keys: hashed}\nstore: {redis: 'redis://127.0.0.1:6379'}",
            "privacy.secret_env (line 1): is missing; servers that share a Redis must hash keys with the same secret",
        ),
        (
            "privacy: {key: hashed}",
            "privacy.key (line 1): unknown key `key`; did you mean `keys`?",
        ),
        (
            "top: on",
            "top (line 1): expected off, or a map such as {keys: 1000, max_bytes: 32MiB}, got",
        ),
        ("top: {keys: 9}", "top.keys (line 1): must be 10 to 100000"),
        (
            "top: {max_bytes: 1MiB}",
            "top.max_bytes (line 1): must be 4MiB to 16GiB",
        ),
        (
            "listen: {resp: {address: '127.0.0.1:6380', top: true}}",
            "listen.resp.top (line 1): needs `password` or `password_env`, because the command TIDEGATE.TOP reveals",
        ),
    ] {
        let found = mistakes(text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with(expected), "{found:?}");
    }
}

#[test]
fn the_command_of_the_redis_protocol_is_off_by_default() {
    let top = |text: &str| Config::parse(text).unwrap().listeners.resp.top;
    assert!(!top(""));
    assert!(!top(
        "listen: {resp: {address: '127.0.0.1:6380', password: s}}"
    ));
    assert!(top(
        "listen: {resp: {address: '127.0.0.1:6380', password: s, top: true}}"
    ));
}
