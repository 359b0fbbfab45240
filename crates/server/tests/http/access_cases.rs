//! Access control test cases for both the HTTP listener and the admin listener.

use std::fmt::Debug;

use crate::client::Answer;

/// Values of `Authorization`, and whether each value is accepted if the token is `secret`.
pub(crate) const AUTHORIZATIONS: [(Option<&str>, bool); 10] = [
    (None, false),
    (Some("Bearer wrong!"), false),
    (Some("Bearer secre"), false),
    (Some("Bearer secret2"), false),
    (Some("Bearer "), false),
    (Some("Bearer"), false),
    (Some("Basic secret"), false),
    (Some("secret"), false),
    (Some("Bearer secret"), true),
    (Some("bearer secret"), true),
];

/// Headers that a browser sends with requests from this site's pages and other sites' pages, each
/// with the expected status.
pub(crate) const PAGES: [((&str, &str), u16); 6] = [
    (("sec-fetch-site", "cross-site"), 403),
    (("sec-fetch-site", "same-site"), 403),
    (("origin", "http://evil.example"), 403),
    (("origin", "null"), 403),
    (("sec-fetch-site", "none"), 200),
    (("sec-fetch-site", "same-origin"), 200),
];

/// Headers of requests to various hosts, each with the expected status. A browser may only use a
/// host name that no attacker controls.
pub(crate) const REBOUND_PAGES: &[(&[(&str, &str)], u16)] = &[
    (&[("host", "evil.example:8080")], 200),
    (
        &[
            ("host", "evil.example:8080"),
            ("origin", "http://evil.example:8080"),
        ],
        403,
    ),
    (
        &[
            ("host", "evil.example:8080"),
            ("sec-fetch-site", "same-origin"),
        ],
        403,
    ),
    (&[("host", "evil.example"), ("sec-fetch-mode", "cors")], 403),
    (
        &[
            ("host", "127.0.0.1.evil.example"),
            ("sec-fetch-site", "same-origin"),
        ],
        403,
    ),
    (
        &[
            ("host", "LocalHost:8080"),
            ("sec-fetch-site", "same-origin"),
        ],
        200,
    ),
    (
        &[
            ("host", "192.0.2.7:8080"),
            ("origin", "http://192.0.2.7:8080"),
        ],
        200,
    ),
    (
        &[
            ("host", "[2001:db8::1]"),
            ("origin", "https://[2001:db8::1]"),
        ],
        200,
    ),
];

/// Asserts that `answer` is a 401 with a `WWW-Authenticate` header, unless the request had the
/// correct token.
pub(crate) fn assert_access(answer: &Answer, is_right: bool, asked: impl Debug) {
    assert_eq!(answer.status != 401, is_right, "{asked:?}");
    let asks = answer.header("www-authenticate").is_some();
    assert_eq!(asks, !is_right, "{asked:?}");
}

/// Sends twelve invalid tokens in a row. Asserts that ten are checked and two are rate limited.
pub(crate) fn assert_guesses_are_limited(guess: impl FnMut() -> Answer) {
    let answers = std::iter::repeat_with(guess).take(12);
    let statuses: Vec<u16> = answers.map(|answer| answer.status).collect();
    assert_eq!(statuses, [[401; 10].as_slice(), &[429; 2]].concat());
}
