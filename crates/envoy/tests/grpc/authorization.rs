//! Tests the wire format of `Authorization`, and requests by which a client tries to evade the
//! rules.

use std::collections::HashMap;

use tidegate_core::{EntryBlock, EntryBlockTarget};
use tonic::Code as Status;

use crate::{
    client::Client,
    listener::TestListener,
    proto::envoy::{
        config::core::v3::{
            Address, HeaderMap, HeaderValue, HeaderValueOption, SocketAddress, address,
        },
        service::auth::v3::{
            AttributeContext, CheckRequest, CheckResponse, DeniedHttpResponse, OkHttpResponse,
            attribute_context::{HttpRequest, Peer, Request},
            check_response::HttpResponse,
        },
        r#type::v3::StatusCode,
    },
};

const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";

const RULES: &str = "\
grpc: {authorization: true}
rules:
  - {name: logins, when: {path: /login, method: POST}, key: [ip], limits: [2/min]}
  - {name: customers, when: {path: /api/*}, key: [customer], limits: [2/min]}
  - {name: exports, when: {path: /export}, limits: [{algorithm: concurrency, limit: 1}]}
";

/// Returns the message that Envoy would send for a request with `method`, `path` and these headers.
fn check_request(method: &str, path: &str, headers: &[(&str, &str)]) -> CheckRequest {
    let headers = headers
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let http = HttpRequest {
        method: method.to_owned(),
        path: path.to_owned(),
        host: "shop.example:443".to_owned(),
        scheme: "https".to_owned(),
        headers: headers.collect(),
        ..HttpRequest::default()
    };
    let socket = SocketAddress {
        address: "192.0.2.7".to_owned(),
        ..SocketAddress::default()
    };
    let source = Peer {
        address: Some(Address {
            address: Some(address::Address::SocketAddress(socket)),
        }),
    };
    CheckRequest {
        attributes: Some(AttributeContext {
            source: Some(source),
            request: Some(Request { http: Some(http) }),
            context_extensions: HashMap::new(),
        }),
    }
}

fn http(check_request: &mut CheckRequest) -> &mut HttpRequest {
    let attributes = check_request.attributes.as_mut().unwrap();
    attributes.request.as_mut().unwrap().http.as_mut().unwrap()
}

async fn check(client: &mut Client, check_request: CheckRequest) -> CheckResponse {
    client.call(CHECK, check_request).await.unwrap()
}

fn admitted(response: &CheckResponse) -> &OkHttpResponse {
    assert_eq!(response.status.as_ref().unwrap().code, 0);
    match response.http_response.as_ref().unwrap() {
        HttpResponse::OkResponse(admitted) => admitted,
        HttpResponse::DeniedResponse(_) => panic!("{response:?}"),
    }
}

fn denied(response: &CheckResponse) -> &DeniedHttpResponse {
    assert_ne!(response.status.as_ref().unwrap().code, 0);
    match response.http_response.as_ref().unwrap() {
        HttpResponse::DeniedResponse(denied) => denied,
        HttpResponse::OkResponse(_) => panic!("{response:?}"),
    }
}

fn header<'h>(headers: &'h [HeaderValueOption], name: &str) -> &'h str {
    let values = headers.iter().filter_map(|option| {
        assert_eq!(
            option.append,
            Some(false),
            "the header replaces the service's"
        );
        option.header.as_ref()
    });
    let mut values = values.filter(|header| header.key == name);
    values.next().map_or("", |header| &header.value)
}

#[tokio::test]
async fn a_block_by_entries_denies_requests() {
    let listener = TestListener::open(RULES);
    let target = EntryBlockTarget::new(None, &[("ip", "192.0.2.0/24")]).unwrap();
    let block = EntryBlock {
        until: None,
        reason: "abuse".into(),
    };
    let (limiter, mut client) = (&listener.limiter, listener.connect().await);
    admitted(&check(&mut client, check_request("GET", "/", &[])).await);
    (limiter.entry_blocks().set(&target, block, limiter.now())).unwrap();
    for path in ["/login", "/"] {
        let response = check(&mut client, check_request("POST", path, &[])).await;
        let status = denied(&response).status.as_ref().unwrap().code;
        assert_eq!(status, StatusCode::TooManyRequests as i32, "{path}");
    }
}

#[tokio::test]
async fn the_rules_are_not_exposed_without_a_setting() {
    let rules = RULES.replace("true", "false");
    for rules in [&rules, RULES.split_once('\n').unwrap().1] {
        let listener = TestListener::open(rules);
        let mut client = listener.connect().await;
        let login = check_request("POST", "/login", &[]);
        let refused: Result<CheckResponse, _> = client.call(CHECK, login).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Status::Unimplemented);
        let advice = "set `grpc: {authorization: true}` in the rules file";
        assert!(refused.message().contains(advice), "{refused:?}");
        let decided = "tidegate_decisions_total{listener=\"grpc\",outcome=\"allowed\"} 0\n";
        let exposition = listener.limiter.exposition();
        assert!(exposition.contains(decided), "{exposition}");
    }
}

#[tokio::test]
async fn both_outcomes_have_the_rate_limit_fields() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect().await;
    let login = || check_request("POST", "//login?next=/", &[]);
    for left in [1, 0] {
        let response = check(&mut client, login()).await;
        let headers = &admitted(&response).response_headers_to_add;
        assert_eq!(header(headers, "ratelimit-policy"), "\"2/min\";q=2;w=60");
        assert!(header(headers, "ratelimit").contains(&format!(";r={left}")));
        assert_eq!(header(headers, "retry-after"), "");
    }
    let response = check(&mut client, login()).await;
    let denial = denied(&response);
    assert_eq!(
        denial.status.as_ref().unwrap().code(),
        StatusCode::TooManyRequests
    );
    assert_eq!(
        header(&denial.headers, "content-type"),
        "application/problem+json"
    );
    assert_eq!(header(&denial.headers, "retry-after"), "60");
    assert!(header(&denial.headers, "ratelimit").starts_with("\"2/min\";r=0;t="));
    assert!(denial.body.contains("\"status\":429"), "{}", denial.body);
    assert!(!denial.body.contains("logins"), "the rule is hidden");
    // Envoy's access log may contain the rule's name.
    let metadata = format!("{:?}", response.dynamic_metadata);
    for part in ["\"logins\"", "BoolValue(false)", "\"limit\""] {
        assert!(metadata.contains(part), "{part} is not in {metadata}");
    }
    let exposition = listener.limiter.exposition();
    for line in [
        "tidegate_decisions_total{listener=\"grpc\",outcome=\"allowed\"} 2\n",
        "tidegate_decisions_total{listener=\"grpc\",outcome=\"limit\"} 1\n",
    ] {
        assert!(exposition.contains(line), "{exposition}");
    }
}

#[tokio::test]
async fn a_full_service_is_503() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect().await;
    admitted(&check(&mut client, check_request("GET", "/export", &[])).await);
    let response = check(&mut client, check_request("GET", "/export", &[])).await;
    let status = denied(&response).status.as_ref().unwrap().code();
    assert_eq!(status, StatusCode::ServiceUnavailable);
}

#[tokio::test]
async fn a_request_without_a_rule_is_admitted_without_fields() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect().await;
    let response = check(&mut client, check_request("GET", "/about", &[])).await;
    assert!(admitted(&response).response_headers_to_add.is_empty());
    // Envoy's filter for TCP connections does not send HTTP attributes.
    let mut connection = check_request("", "", &[]);
    connection.attributes.as_mut().unwrap().request = None;
    admitted(&check(&mut client, connection).await);
    admitted(&check(&mut client, CheckRequest { attributes: None }).await);
}

#[tokio::test]
async fn an_entry_of_the_route_cannot_be_replaced_by_a_header() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect().await;
    for (number, claimed) in ["a", "b", "c"].into_iter().enumerate() {
        let mut check_request = check_request("GET", "/api/orders", &[("x-customer", claimed)]);
        let attributes = check_request.attributes.as_mut().unwrap();
        let customer = ("customer".to_owned(), "acme".to_owned());
        attributes.context_extensions.extend([customer]);
        let response = check(&mut client, check_request).await;
        if number < 2 {
            admitted(&response);
        } else {
            denied(&response);
        }
    }
}

#[tokio::test]
async fn headers_count_by_line_whether_envoy_joins_them_or_not() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect().await;
    let raw = |lines: &[&str]| {
        let mut check_request = check_request("GET", "/api/orders", &[]);
        let line = |value: &&str| HeaderValue {
            key: "x-customer".to_owned(),
            raw_value: value.as_bytes().to_vec(),
            ..HeaderValue::default()
        };
        http(&mut check_request).header_map = Some(HeaderMap {
            headers: lines.iter().map(line).collect(),
        });
        check_request
    };
    let joined = |value| check_request("GET", "/api/orders", &[("x-customer", value)]);
    // The same customer in three forms: one line in `headers`, one line in `header_map`, and two
    // equal lines that Envoy has joined.
    admitted(&check(&mut client, joined("acme")).await);
    admitted(&check(&mut client, raw(&["acme"])).await);
    denied(&check(&mut client, joined("acme,acme")).await);
    for ambiguous in [
        joined("acme,other"),
        joined(",acme"),
        joined("acme,"),
        raw(&["acme", "other"]),
    ] {
        let response = check(&mut client, ambiguous).await;
        let denial = denied(&response);
        let status = denial.status.as_ref().unwrap().code();
        assert_eq!(status, StatusCode::BadRequest);
        assert!(
            denial.body.contains("has several values"),
            "{}",
            denial.body
        );
    }
    // A comma followed by a space does not separate two lines.
    admitted(&check(&mut client, joined("acme, inc")).await);
}

#[tokio::test]
async fn a_client_cannot_turn_its_denial_into_an_error_of_the_call() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect().await;
    let names: Vec<String> = (0..1_200).map(|number| format!("x-{number}")).collect();
    let many: Vec<(&str, &str)> = names.iter().map(|name| (&**name, "1")).collect();
    let long = "x".repeat(5_000);
    for (check_request, detail) in [
        (
            check_request("GET", "/x/../login", &[]),
            "segments `.` or `..`",
        ),
        (
            check_request("GET", "/login", &many),
            "more than 1000 header lines",
        ),
        (
            check_request("GET", "/api/orders", &[("x-customer", "a\nb")]),
            "HTTP does not allow",
        ),
        (
            check_request("GET", "/api/orders", &[("x-customer", &long)]),
            "the maximum",
        ),
    ] {
        let response = check(&mut client, check_request).await;
        let denial = denied(&response);
        let status = denial.status.as_ref().unwrap().code();
        assert_eq!(status, StatusCode::BadRequest, "{detail}");
        assert!(denial.body.contains(detail), "{detail}: {}", denial.body);
    }
    let exposition = listener.limiter.exposition();
    let counted = "tidegate_bad_requests_total{listener=\"grpc\"} 4\n";
    assert!(exposition.contains(counted), "{exposition}");
}

#[tokio::test]
async fn a_malformed_or_too_large_message_is_an_error_of_the_call() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect().await;
    let mut extended = check_request("GET", "/", &[]);
    let extensions = (0..40).map(|number| (number.to_string(), String::new()));
    let attributes = extended.attributes.as_mut().unwrap();
    attributes.context_extensions.extend(extensions);
    let large = "x".repeat(300 << 10);
    for (check_request, code, message) in [
        (
            extended,
            Status::InvalidArgument,
            "attributes.context_extensions: exceeds the maximum of 32 entries",
        ),
        (
            check_request("GET", &large, &[]),
            Status::ResourceExhausted,
            "exceeds the maximum of 262144 bytes",
        ),
    ] {
        let error = client
            .call::<_, CheckResponse>(CHECK, check_request)
            .await
            .unwrap_err();
        assert_eq!(error.code(), code, "{error:?}");
        assert!(error.message().contains(message), "{error:?}");
    }
}
