//! Tests of unreachable, misbehaving and silent upstreams. The client quickly gets a clear response
//! without details about the upstream.

use crate::{
    client::Answer,
    listener::TestListener,
    upstream::{ServerConnection, Upstream},
};

/// Returns the response that a client gets if the upstream handles connections with `handler`.
fn answer_of(handler: impl Fn(&mut ServerConnection) + Send + Sync + 'static) -> Answer {
    let upstream = Upstream::start(handler);
    let listener = TestListener::with(upstream.url(), "timeouts: {head: 100ms, idle: 100ms}");
    let answer = listener.get("/");
    assert!(
        !answer.body.contains(&upstream.address.port().to_string()),
        "an address is revealed: {answer:?}"
    );
    answer
}

#[test]
fn a_refused_connection_is_502() {
    let closed_address = Upstream::closed_address();
    let answer = TestListener::in_front_of(format!("http://{closed_address}")).get("/");
    assert_eq!(answer.status, 502);
    assert_eq!(answer.problem(), "the service cannot be reached");
}

#[test]
fn an_unresolvable_name_is_502() {
    let answer = TestListener::with("http://no..where", "timeouts: {connect: 20s}").get("/");
    assert_eq!(answer.status, 502);
    assert!(!answer.body.contains("no..where"), "{answer:?}");
}

#[test]
fn an_invalid_response_is_502() {
    let garbage: [&'static str; 9] = [
        "SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP/1.1 999999 X\r\n\r\n",
        "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ncontent-length: 2,\r\n\r\nok",
        "HTTP/1.1 200 OK\r\na: b\r\n folded\r\n\r\n",
    ];
    for bytes in garbage {
        let answer = answer_of(move |connection| {
            connection.head();
            connection.send(bytes);
            connection.until_closed();
        });
        assert_eq!(answer.status, 502, "{bytes:?}");
        let problem = answer.problem();
        assert_eq!(problem, "invalid response from upstream");
    }
}

#[test]
fn an_unrequested_protocol_switch_is_502() {
    let answer = answer_of(|connection| {
        connection.head();
        connection
            .send("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n");
        connection.until_closed();
    });
    assert_eq!(answer.status, 502);
}

#[test]
fn a_too_large_response_head_is_502() {
    let answer = answer_of(|connection| {
        connection.head();
        connection.send(format!(
            "HTTP/1.1 200 OK\r\na: {}\r\n\r\n",
            "x".repeat(200_000)
        ));
        connection.until_closed();
    });
    assert_eq!(answer.status, 502);
    let answer = answer_of(|connection| {
        connection.head();
        connection.send(format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(101)));
        connection.until_closed();
    });
    assert_eq!(answer.status, 502);
}

/// Interim responses are dropped. Without a maximum, an upstream could send an endless number of
/// interim responses.
#[test]
fn too_many_interim_responses_are_502() {
    const MOST: usize = 100;
    let upstream = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            let count: usize = head.split(['/', ' ']).nth(2).unwrap().parse().unwrap();
            connection.send("HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(count));
            connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    assert_eq!(listener.get(&format!("/{MOST}")).status, 200);
    // Interim responses are counted separately for each request.
    assert_eq!(listener.get(&format!("/{MOST}")).status, 200);
    assert_eq!(upstream.connections(), 1);
    for count in [MOST + 1, 20_000] {
        assert_eq!(listener.get(&format!("/{count}")).status, 502, "{count}");
    }
    let text = listener.runtime.exposition();
    let counted = r#"tidegate_proxy_failures_total{upstream="app",failure="bad_answer"} 2"#;
    assert!(text.contains(counted), "{text}");
}

#[test]
fn a_connection_closed_without_a_response_is_502_and_not_retried() {
    let upstream = Upstream::start(|connection| {
        connection.head();
        connection.close();
    });
    let answer = TestListener::in_front_of(upstream.url()).get("/");
    assert_eq!(answer.status, 502);
    assert_eq!(upstream.heads().len(), 1);
}

#[test]
fn an_upstream_that_never_answers_is_504() {
    let answer = answer_of(|connection| {
        connection.head();
        connection.until_closed();
    });
    assert_eq!(answer.status, 504);
    assert_eq!(answer.problem(), "the service did not answer in time");
}

#[test]
fn an_incomplete_response_head_is_504() {
    let answer = answer_of(|connection| {
        connection.head();
        connection.send("HTTP/1.1 200 OK\r\ncontent-le");
        connection.until_closed();
    });
    assert_eq!(answer.status, 504);
}

/// The proxy has already forwarded the head when it detects the error. The proxy must abort the
/// client connection, so that the client does not mistake a partial body for the complete body.
#[test]
fn a_body_shorter_than_its_length_aborts_the_response() {
    for (handler, begins, failure) in [
        (
            (|connection: &mut ServerConnection| connection.close()) as fn(&mut ServerConnection),
            "content-length: 10\r\n",
            "broken_off",
        ),
        (
            |connection| connection.until_closed(),
            "content-length: 10\r\n",
            "idle_timeout",
        ),
        (
            |connection| connection.close(),
            "transfer-encoding: chunked\r\n",
            "broken_off",
        ),
    ] {
        let upstream = Upstream::start(move |connection| {
            connection.head();
            let piece = if begins.starts_with('c') {
                "half"
            } else {
                "4\r\nhalf\r\n"
            };
            connection.send(format!("HTTP/1.1 200 OK\r\n{begins}\r\n{piece}"));
            handler(connection);
        });
        let listener = TestListener::with(upstream.url(), "timeouts: {idle: 100ms}");
        let mut client = listener.connect();
        client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
        let answer = client.until_closed();
        assert!(answer.contains("half"), "{answer}");
        assert!(
            !answer.ends_with("0\r\n\r\n"),
            "a truncated response looks complete: {answer}"
        );
        let (metrics, url) = (listener.runtime.exposition(), upstream.url());
        let counted = format!(
            "tidegate_proxy_incomplete_responses_total{{upstream=\"app\",endpoint=\"{url}\",failure=\"{failure}\"}} 1\n"
        );
        assert!(metrics.contains(&counted), "{metrics}");
    }
}

#[test]
fn bytes_after_a_body_are_not_the_next_response() {
    let upstream = Upstream::start(|connection| {
        while connection.head().is_some() {
            connection.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison");
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    for _ in 0..5 {
        let answer = client.ask("GET", "/", &[], b"");
        assert_ne!(answer.body, "poison");
    }
}

/// If the proxy switched protocols, the upstream would interpret the rest of the request body as
/// data of the new protocol.
#[test]
fn a_protocol_switch_before_the_end_of_the_request_is_502() {
    let upstream = Upstream::start(|connection| {
        connection.head();
        connection.send(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n",
        );
        connection.until_closed();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: echo\r\ncontent-length: 6\r\n\r\nabc");
    assert_eq!(client.read_answer(false).status, 502);
}

/// A response to `HEAD` has no body. If bytes follow a response to `HEAD`, they must not be read as
/// the next response.
#[test]
fn an_unexpected_body_closes_the_connection() {
    const BODY: &str = "HTTP/1.1 418 Smuggled\r\ncontent-length: 0\r\n\r\n";
    let upstream = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            let body = if head.starts_with("HEAD") { BODY } else { "" };
            connection.send(format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ));
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    for _ in 0..3 {
        assert_eq!(client.ask("HEAD", "/", &[], b"").status, 200);
        assert_eq!(client.ask("GET", "/", &[], b"").status, 200);
    }
}
