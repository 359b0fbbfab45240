//! Tests of the console's files: their headers, and which requests can load them.

use crate::{client::Answer, listener::TestListener};

/// Returns the paths of all files that the page loads: the files in its HTML, and the files that
/// its scripts import.
fn loaded_files(listener: &TestListener) -> Vec<String> {
    let page = listener.ask("GET", "/", "").body;
    let quoted = |text: &str, before: &str| -> Vec<String> {
        let rest = text.split(before).skip(1);
        rest.map(|rest| rest.split('"').next().unwrap().to_owned())
            .collect()
    };
    let mut files = [
        quoted(&page, " href=\"console/"),
        quoted(&page, " src=\"console/"),
    ]
    .concat();
    let mut at = 0;
    while at < files.len() {
        let file = listener.ask("GET", &format!("/console/{}", files[at]), "");
        files.extend(quoted(&file.body, " from \"./"));
        files.sort();
        files.dedup();
        at += 1;
    }
    let paths = files.iter().map(|file| format!("/console/{file}"));
    paths.chain(["/".to_owned()]).collect()
}

fn assert_headers(answer: &Answer, path: &str) {
    let policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    for (name, value) in [
        ("content-security-policy", policy),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-cache"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{path}");
    }
}

#[test]
fn every_file_is_served_without_a_token_and_with_a_strict_policy() {
    let listener = TestListener::with_token(Some("secret"));
    let files = loaded_files(&listener);
    assert!(files.len() > 10, "{files:?}");
    for path in &files {
        let answer = listener.ask("GET", path, "");
        assert_eq!(answer.status, 200, "{path}");
        let expected = match path.rsplit('.').next().unwrap() {
            "js" => "text/javascript; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            "svg" => "image/svg+xml",
            _ => "text/html; charset=utf-8",
        };
        assert_eq!(answer.header("content-type"), Some(expected), "{path}");
        assert_headers(&answer, path);
        let head = listener.ask("HEAD", path, "");
        assert_eq!((head.status, &*head.body), (200, ""), "{path}");
        let posted = listener.ask("POST", path, "");
        assert_eq!((posted.status, posted.header("allow")), (405, Some("GET")));
    }
    for unknown in [
        "/console",
        "/console/",
        "/console/nothing.js",
        "/index.html",
    ] {
        assert_eq!(listener.ask("GET", unknown, "").status, 401, "{unknown}");
    }
    // The data that the console shows requires the token.
    for path in ["/v1/status", "/v1/rules", "/v1/traffic", "/v1/blocks"] {
        assert_eq!(listener.ask("GET", path, "").status, 401, "{path}");
    }
}

#[test]
fn a_file_that_the_browser_has_is_not_sent_again() {
    let listener = TestListener::open();
    let first = listener.ask("GET", "/console/main.js", "");
    let tag = first.header("etag").unwrap().to_owned();
    let again = listener.ask_with("GET", "/console/main.js", &[("if-none-match", &tag)], "");
    assert_eq!((again.status, &*again.body), (304, ""));
    assert_eq!(again.header("etag"), Some(&*tag));
    assert_headers(&again, "/console/main.js");
    let changed = listener.ask_with("GET", "/console/main.js", &[("if-none-match", "\"0\"")], "");
    assert_eq!((changed.status, &changed.body), (200, &first.body));
}

/// The headers that a browser sends when the user follows a link on another site's page.
const LINK: [(&str, &str); 3] = [
    ("sec-fetch-site", "cross-site"),
    ("sec-fetch-mode", "navigate"),
    ("sec-fetch-dest", "document"),
];

/// Links to the console must work, for example in a runbook or a chat.
#[test]
fn a_link_on_another_site_opens_the_page_and_nothing_else() {
    for token in [None, Some("secret")] {
        let listener = TestListener::with_token(token);
        let status = |method: &str, path: &str, headers: &[(&str, &str)]| {
            let bearer = ("authorization", "Bearer secret");
            let headers = [&[("host", "localhost:8082"), bearer], headers].concat();
            listener.ask_with(method, path, &headers, "").status
        };
        assert_eq!(status("GET", "/", &LINK), 200, "{token:?}");
        for path in ["/console/main.js", "/v1/status", "/v1/blocks", "/metrics"] {
            assert_eq!(status("GET", path, &LINK), 403, "{token:?} {path}");
        }
        assert_eq!(status("POST", "/", &LINK), 403, "{token:?}");
        let [site, mode, dest] = LINK;
        for other in [
            [site, mode, ("sec-fetch-dest", "iframe")],
            [site, mode, ("sec-fetch-dest", "object")],
            [
                site,
                ("sec-fetch-mode", "no-cors"),
                ("sec-fetch-dest", "script"),
            ],
            [site, ("sec-fetch-mode", "cors"), dest],
        ] {
            assert_eq!(status("GET", "/", &other), 403, "{token:?} {other:?}");
        }
        let rebound = [&LINK[..], &[("host", "evil.example")]].concat();
        assert_eq!(status("GET", "/", &rebound), 403, "{token:?}");
    }
}
