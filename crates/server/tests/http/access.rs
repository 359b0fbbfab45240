//! Tests of authentication and cross-site protection.

use crate::door::Door;

const BODY: &str = r#"{"key": "k", "algorithm": "gcra", "rate": "1/h", "burst": 99}"#;
const GUARDED: &str = "listen: {http: {address: '127.0.0.1:0', token: secret}}";

#[test]
fn with_a_token_only_requests_with_it_are_allowed() {
    let door = Door::open(GUARDED);
    let ask = |method: &str, path: &str, headers: &[(&str, &str)]| {
        door.connect().ask(method, path, headers, BODY.as_bytes())
    };
    for (minute, (header, allowed)) in (0..).zip([
        (None, false),
        (Some(("authorization", "Bearer wrong!")), false),
        (Some(("authorization", "Basic secret")), false),
        (Some(("authorization", "Bearer secre")), false),
        (Some(("tidegate-token", "wrong")), false),
        (Some(("authorization", "Bearer secret")), true),
        (Some(("tidegate-token", "secret")), true),
    ]) {
        door.at_millis(minute * 60_000);
        let headers: Vec<_> = header.into_iter().collect();
        for (method, path) in [
            ("POST", "/v1/throttle"),
            ("POST", "/v1/check"),
            ("POST", "/v1/peek"),
            ("GET", "/v1/authorize"),
            ("GET", "/nowhere"),
        ] {
            let answer = ask(method, path, &headers);
            assert_eq!(answer.status != 401, allowed, "{header:?} {method} {path}");
            assert_eq!(answer.header("www-authenticate").is_some(), !allowed);
        }
    }
    // In a forward-auth request, `Authorization` belongs to the client's request.
    let headers = [
        ("authorization", "Bearer the client's own"),
        ("tidegate-token", "secret"),
    ];
    assert_eq!(ask("GET", "/v1/authorize", &headers).status, 200);
    let statuses: Vec<u16> = (0..12)
        .map(|_| ask("GET", "/v1/authorize", &headers[..1]).status)
        .collect();
    assert_eq!(statuses, [[401; 10].as_slice(), &[429; 2]].concat());
}

#[test]
fn cross_site_browser_requests_are_rejected() {
    let door = Door::open("");
    for (header, status) in [
        (("sec-fetch-site", "cross-site"), 403),
        (("sec-fetch-site", "same-site"), 403),
        (("origin", "http://evil.example"), 403),
        (("origin", "null"), 403),
        (("sec-fetch-site", "none"), 200),
        (("sec-fetch-site", "same-origin"), 200),
    ] {
        let answer = door
            .connect()
            .ask("POST", "/v1/throttle", &[header], BODY.as_bytes());
        assert_eq!(answer.status, status, "{header:?}");
        // The headers of a forward-auth request are those of a browser's request to another
        // service.
        assert_eq!(door.authorize("", &[header]).status, 200, "{header:?}");
    }
}
