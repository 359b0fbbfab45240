//! The console: a page for operators, compiled into the binary.
//!
//! The files contain no secret and are the same for every client, so they need no token. The page
//! asks the operator for the token, and sends the token with its API requests. The page's
//! Content-Security-Policy forbids loading from other hosts, inline scripts and framing.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use http_body_util::Full;
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{
        CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderName, HeaderValue,
        IF_NONE_MATCH, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
    },
};
use tidegate_net::response::Answer;

/// The path of the page.
const PAGE: &str = "/";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The files: path, media type and content.
const FILES: [(&str, &str, &str); 16] = [
    (PAGE, HTML, include_str!("console/index.html")),
    ("/console/style.css", CSS, include_str!("console/style.css")),
    ("/console/icon.svg", SVG, include_str!("console/icon.svg")),
    ("/console/main.js", SCRIPT, include_str!("console/main.js")),
    ("/console/api.js", SCRIPT, include_str!("console/api.js")),
    ("/console/dom.js", SCRIPT, include_str!("console/dom.js")),
    (
        "/console/format.js",
        SCRIPT,
        include_str!("console/format.js"),
    ),
    (
        "/console/chart.js",
        SCRIPT,
        include_str!("console/chart.js"),
    ),
    (
        "/console/overview.js",
        SCRIPT,
        include_str!("console/overview.js"),
    ),
    (
        "/console/denials.js",
        SCRIPT,
        include_str!("console/denials.js"),
    ),
    (
        "/console/events.js",
        SCRIPT,
        include_str!("console/events.js"),
    ),
    (
        "/console/history.js",
        SCRIPT,
        include_str!("console/history.js"),
    ),
    ("/console/keys.js", SCRIPT, include_str!("console/keys.js")),
    (
        "/console/explain.js",
        SCRIPT,
        include_str!("console/explain.js"),
    ),
    (
        "/console/blocks.js",
        SCRIPT,
        include_str!("console/blocks.js"),
    ),
    (
        "/console/server.js",
        SCRIPT,
        include_str!("console/server.js"),
    ),
];

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The headers of every file. With `no-cache`, the browser revalidates a cached file before each
/// use. After an upgrade, the page and the API therefore have the same version.
const HEADERS: [(HeaderName, &str); 7] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-cache"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

/// Returns whether `path` is a file of the console.
pub(super) fn has_file(path: &str) -> bool {
    find(path).is_some()
}

/// Returns whether the browser opens the page because the user followed a link or entered the
/// address. A page of another site may link to the console, because the console does nothing until
/// the operator uses it. A page of another site may not load the console in a frame or with a
/// script.
pub(super) fn is_opened(request: &Request<Incoming>) -> bool {
    let is = |name: &'static str, expected: &str| {
        let mut lines = request.headers().get_all(name).iter();
        lines.next().is_some_and(|value| value == expected) && lines.next().is_none()
    };
    request.uri().path() == PAGE
        && request.method().is_safe()
        && is("sec-fetch-mode", "navigate")
        && is("sec-fetch-dest", "document")
}

/// Returns the file at `path`, or 304 if the browser's copy is up to date.
pub(super) fn file(path: &str, headers: &HeaderMap) -> Option<Answer> {
    let (_, media_type, content) = find(path)?;
    let tag = entity_tag(content);
    let is_known = headers.get(IF_NONE_MATCH) == Some(&tag);
    let mut answer = Response::new(Full::from(if is_known {
        Bytes::new()
    } else {
        Bytes::from_static(content.as_bytes())
    }));
    if is_known {
        *answer.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = answer.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(ETAG, tag);
    Some(answer)
}

fn find(path: &str) -> Option<(&'static str, &'static str, &'static str)> {
    FILES.into_iter().find(|(known, _, _)| *known == path)
}

/// Returns a file's entity tag, which changes with the content.
fn entity_tag(content: &str) -> HeaderValue {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    let tag = format!("\"{:016x}\"", hasher.finish());
    // The tag consists of hexadecimal digits and quotes, which are valid in a header.
    HeaderValue::from_str(&tag).unwrap_or(HeaderValue::from_static("\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files must be small, so that the page also loads over a slow tunnel.
    #[test]
    fn the_files_are_small() {
        let bytes: usize = FILES.iter().map(|(_, _, content)| content.len()).sum();
        assert!(bytes < 110_000, "{bytes}");
    }

    /// Keys and names come from clients, so the page must never parse them as HTML or as code. The
    /// page's Content-Security-Policy forbids inline scripts and styles.
    #[test]
    fn the_files_contain_nothing_that_interprets_data() {
        for (path, _, content) in FILES {
            for forbidden in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "DOMParser",
                "createContextualFragment",
                "setHTML",
                "srcdoc",
                "eval(",
                "new Function",
                "javascript:",
                "style=",
                "onclick=",
                "onload=",
                "<script>",
                "<style>",
                "document.cookie",
            ] {
                assert!(!content.contains(forbidden), "{forbidden} in {path}");
            }
            let urls = content.match_indices("://");
            let foreign: Vec<&str> = urls
                .map(|(at, _)| &content[at..content.len().min(at + 30)])
                .filter(|url| !url.starts_with("://www.w3.org/2000/svg"))
                .collect();
            assert_eq!(foreign, [""; 0], "other hosts in {path}");
        }
    }

    #[test]
    fn every_file_has_its_own_entity_tag() {
        let mut tags: Vec<HeaderValue> = FILES.map(|(_, _, file)| entity_tag(file)).into();
        tags.sort_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
        tags.dedup();
        assert_eq!(tags.len(), FILES.len());
        assert!(tags.iter().all(|tag| tag.len() == 18));
    }
}
