//! `Authorization`: the service that Envoy's `ext_authz` filter calls for each request.
//!
//! The attributes of a request are converted to the same entries as on `/v1/authorize`, so that one
//! rules file works with all proxies. A denial is a normal response. The rejection of an ambiguous
//! request is also a normal response, because if the call failed, an Envoy with
//! `failure_mode_allow` would admit the request.
//!
//! Messages are decoded by hand for two reasons: most attributes are not used, and the size of a
//! list must be checked before memory is allocated for the list.

use std::{borrow::Cow, net::IpAddr};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use prost_types::{Struct, Value as WireValue, value::Kind};
use tidegate::{DecidedRequest, RateLimiter as _};
use tidegate_config::Headers;
use tidegate_core::{Cost, Effect, Request, Timestamp, Verdict};
use tidegate_identity::{
    AmbiguousRequest, DescribedRequest, ForwardAuthContext, ForwardAuthRequest, HeaderDialect,
    MAX_HEADER_LINES, TooManyHeaderLines, is_never_split, joined_lines,
};
use tidegate_limiter::{
    ServerLimiter,
    entries::{AuditedRequest, Origin, used_entries},
    metrics::ListenerKind,
    with_scratch,
};
use tidegate_tower::{RuleNames, denial_response, malformed_response};
use tonic::{Code, Status};

use super::{
    AuthorizationContext, GrpcContext,
    fields::{FieldValue, MalformedMessage, MessageFields},
    proto::{
        envoy::{
            config::core::v3::{HeaderValue as WireHeader, HeaderValueOption},
            service::auth::v3::{
                CheckResponse, DeniedHttpResponse, OkHttpResponse, check_response::HttpResponse,
            },
            r#type::v3::HttpStatus,
        },
        google::rpc::Status as WireStatus,
    },
};

/// The maximum number of context extensions. A context extension is an entry that Envoy's
/// configuration sets.
const MAX_EXTENSIONS: usize = 32;

/// The reason why a request is rejected without a decision.
#[derive(Debug)]
enum RejectionReason {
    /// The message is malformed. Envoy never sends a malformed message.
    Message(Status),
    /// The client's request cannot be counted, so it must be denied.
    Client(String),
}

impl From<MalformedMessage> for RejectionReason {
    fn from(malformed: MalformedMessage) -> Self {
        Self::Message(malformed.into())
    }
}

impl From<AmbiguousRequest> for RejectionReason {
    fn from(ambiguous: AmbiguousRequest) -> Self {
        Self::Client(ambiguous.to_string())
    }
}

/// Decides the request in `message`, which the Envoy at `sender` sent. Fails if the service is not
/// enabled, because the rules must then not be applied to `message`.
pub(super) async fn check(
    context: &GrpcContext,
    sender: IpAddr,
    message: &[u8],
) -> Result<CheckResponse, Status> {
    let Some(settings) = &context.authorization else {
        return Err(Status::unimplemented(
            "the authorization service is off; set `grpc: {authorization: true}` in the rules file \
             and restart the server",
        ));
    };
    match decide(&context.limiter, settings, sender, message).await {
        Ok(response) => Ok(response),
        Err(RejectionReason::Message(status)) => Err(status),
        Err(RejectionReason::Client(problem)) => {
            let metrics = context.limiter.metrics();
            metrics.count_bad_request(ListenerKind::Grpc);
            let response = malformed_response(&problem);
            Ok(denied(Code::InvalidArgument, &problem, response))
        }
    }
}

async fn decide(
    limiter: &ServerLimiter,
    settings: &AuthorizationContext,
    sender: IpAddr,
    message: &[u8],
) -> Result<CheckResponse, RejectionReason> {
    let attributes = Attributes::read(message)?;
    let headers = attributes.header_map()?;
    let identity = &settings.identity;
    let described = DescribedRequest {
        headers: &headers,
        method: given(&attributes.method),
        target: given(&attributes.path),
        host: given(&attributes.host),
        scheme: given(&attributes.scheme),
        // If Envoy listens on a Unix socket, its client has no address, so use Envoy's own address.
        peer: Some(attributes.peer.unwrap_or(sender)),
        entries: &attributes.extensions,
    };
    let forwarded = ForwardAuthRequest::described(
        described,
        ForwardAuthContext {
            peer: sender,
            dialect: HeaderDialect::Detect,
            trust: &identity.trust,
            derived: &identity.derived,
            geoip: identity.geoip.as_deref(),
        },
    );
    let rules = limiter.rules();
    let values = used_entries(&forwarded, &rules)?;
    let entries: Vec<(&str, &str)> = values
        .iter()
        .map(|(name, value)| (*name, &**value))
        .collect();
    let counted = |error: tidegate_core::RequestError| RejectionReason::Client(error.to_string());
    let request = Request::new(&entries, Cost::ONE).map_err(counted)?;
    let names = settings.headers.writer().rule_names();
    let now = limiter.now();
    let checked = with_scratch(async |scratch| {
        let checked = limiter.check(&rules, scratch, &request, Effect::Charge);
        checked.boxed().await.map(|verdict| {
            let audited = AuditedRequest {
                listener: ListenerKind::Grpc,
                origin: Origin::Listener,
                decided: DecidedRequest {
                    request: &request,
                    rules: &rules,
                    now,
                },
            };
            limiter.observe_and_audit(audited, &verdict);
            written(settings.headers, &verdict, now)
        })
    });
    checked.await.map_err(|error| match names {
        // Envoy passes the error on to the client.
        RuleNames::Hidden => RejectionReason::Client(error.without_cause().to_string()),
        RuleNames::Shown => RejectionReason::Client(error.to_string()),
    })
}

/// Returns an attribute, or `None` if the attribute is empty. In protobuf, an absent string is the
/// same as an empty string.
fn given(attribute: &str) -> Option<&str> {
    Some(attribute).filter(|attribute| !attribute.is_empty())
}

/// Builds the response for `verdict`, a verdict from the time `now`.
fn written(headers: Headers, verdict: &Verdict<'_>, now: Timestamp) -> CheckResponse {
    let writer = headers.writer();
    let rule_names = writer.rule_names();
    let mut headers = HeaderMap::new();
    writer.write_once(verdict, now, &mut headers);
    let metadata = Some(metadata(verdict));
    if verdict.allowed {
        return CheckResponse {
            status: Some(WireStatus::default()),
            http_response: Some(HttpResponse::OkResponse(OkHttpResponse {
                response_headers_to_add: options(&headers),
                ..OkHttpResponse::default()
            })),
            dynamic_metadata: metadata,
        };
    }
    let mut response = denial_response(verdict, rule_names);
    response.headers_mut().extend(headers);
    let code = if response.status() == StatusCode::TOO_MANY_REQUESTS {
        Code::ResourceExhausted
    } else {
        Code::Unavailable
    };
    CheckResponse {
        dynamic_metadata: metadata,
        ..denied(code, "denied by a limit", response)
    }
}

/// Builds the message that denies a request. Envoy sends `response` to its client.
fn denied(code: Code, message: &str, response: Response<Bytes>) -> CheckResponse {
    let (head, body) = response.into_parts();
    let denied = DeniedHttpResponse {
        status: Some(HttpStatus {
            code: i32::from(head.status.as_u16()),
        }),
        headers: options(&head.headers),
        // The body contains problem details (RFC 9457) in JSON, which is always UTF-8.
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    CheckResponse {
        status: Some(WireStatus {
            code: code.into(),
            message: message.to_owned(),
        }),
        http_response: Some(HttpResponse::DeniedResponse(denied)),
        dynamic_metadata: None,
    }
}

/// Converts `headers` to options. In the response, each option replaces the header of the same
/// name.
fn options(headers: &HeaderMap) -> Vec<HeaderValueOption> {
    let option = |(name, value): (&HeaderName, &HeaderValue)| HeaderValueOption {
        header: Some(WireHeader {
            key: name.as_str().to_owned(),
            value: String::from_utf8_lossy(value.as_bytes()).into_owned(),
            ..WireHeader::default()
        }),
        append: Some(false),
    };
    headers.iter().map(option).collect()
}

/// Returns the verdict as dynamic metadata, for Envoy's access log. Clients do not see the
/// metadata, so it contains the rule's name.
fn metadata(verdict: &Verdict<'_>) -> Struct {
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let fields = [
        ("allowed", Some(Kind::BoolValue(verdict.allowed))),
        ("rule", verdict.rule.map(text)),
        ("reason", verdict.reason.map(|reason| text(reason.as_str()))),
    ];
    let fields = fields.into_iter().filter_map(|(name, kind)| {
        let value = WireValue { kind: Some(kind?) };
        Some((name.to_owned(), value))
    });
    Struct {
        fields: fields.collect(),
    }
}

/// The attributes of a request that are converted to entries.
#[derive(Debug, Default)]
struct Attributes<'m> {
    peer: Option<IpAddr>,
    method: Cow<'m, str>,
    path: Cow<'m, str>,
    host: Cow<'m, str>,
    scheme: Cow<'m, str>,
    /// The headers from an Envoy that joins all lines of the same header with commas.
    joined: Vec<(&'m [u8], &'m [u8])>,
    /// The headers from an Envoy with `encode_raw_headers`, with one element per line.
    raw: Vec<(&'m [u8], &'m [u8])>,
    extensions: Vec<(&'m str, &'m str)>,
}

impl<'m> Attributes<'m> {
    /// Decodes a `CheckRequest`. If a message is repeated, its occurrences are merged, as in
    /// protobuf.
    fn read(message: &'m [u8]) -> Result<Self, RejectionReason> {
        let mut attributes = Self::default();
        let mut fields = MessageFields::of(message);
        while let Some((number, value)) = fields.next()? {
            if number == 1 {
                attributes.read_context(value.bytes())?;
            }
        }
        Ok(attributes)
    }

    fn read_context(&mut self, message: &'m [u8]) -> Result<(), RejectionReason> {
        let mut fields = MessageFields::of(message);
        while let Some((number, value)) = fields.next()? {
            match number {
                1 => self.peer = address(value.bytes())?.or(self.peer),
                4 => {
                    let mut fields = MessageFields::of(value.bytes());
                    while let Some((number, value)) = fields.next()? {
                        if number == 2 {
                            self.read_http(value.bytes())?;
                        }
                    }
                }
                10 => {
                    if self.extensions.len() >= MAX_EXTENSIONS {
                        let problem = format!(
                            "attributes.context_extensions: exceeds the maximum of \
                             {MAX_EXTENSIONS} entries"
                        );
                        return Err(RejectionReason::Message(Status::invalid_argument(problem)));
                    }
                    let (name, value) = pair(value.bytes(), 2)?;
                    self.extensions.push((name.text()?, value.text()?));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read_http(&mut self, message: &'m [u8]) -> Result<(), RejectionReason> {
        let mut fields = MessageFields::of(message);
        while let Some((number, value)) = fields.next()? {
            match number {
                2 => self.method = lossy(value),
                3 => add(&mut self.joined, value.bytes(), 2)?,
                4 => self.path = lossy(value),
                5 => self.host = lossy(value),
                6 => self.scheme = lossy(value),
                13 => {
                    let mut fields = MessageFields::of(value.bytes());
                    while let Some((number, value)) = fields.next()? {
                        if number == 1 {
                            add(&mut self.raw, value.bytes(), 3)?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the headers, with one element for each line that the client sent.
    ///
    /// Without `encode_raw_headers`, Envoy joins all lines of the same header, so split the values
    /// again.
    fn header_map(&self) -> Result<HeaderMap, RejectionReason> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.raw {
            append(&mut headers, name, value)?;
        }
        for (name, value) in &self.joined {
            if HeaderName::from_bytes(name).is_ok_and(|name| is_never_split(&name)) {
                append(&mut headers, name, value)?;
                continue;
            }
            for line in joined_lines(value) {
                append(&mut headers, name, line)?;
            }
        }
        Ok(headers)
    }
}

/// Appends a header line. Pseudo-headers, such as `:path`, are skipped, because Envoy also sends
/// them as attributes.
fn append(headers: &mut HeaderMap, name: &[u8], value: &[u8]) -> Result<(), RejectionReason> {
    if name.starts_with(b":") {
        return Ok(());
    }
    if headers.len() >= MAX_HEADER_LINES {
        return Err(RejectionReason::Client(TooManyHeaderLines.to_string()));
    }
    let name = HeaderName::from_bytes(name);
    let value = HeaderValue::from_bytes(value);
    // Envoy only sends names and values that are valid in HTTP.
    let (Ok(name), Ok(value)) = (name, value) else {
        let problem = "a header has a name or a value that HTTP does not allow".to_owned();
        return Err(RejectionReason::Client(problem));
    };
    headers.append(name, value);
    Ok(())
}

/// Adds an element to a list of headers. A list is truncated to one more than its maximum, which is
/// enough to detect that it is too long.
fn add<'m>(
    headers: &mut Vec<(&'m [u8], &'m [u8])>,
    message: &'m [u8],
    value_field: u32,
) -> Result<(), RejectionReason> {
    if headers.len() <= MAX_HEADER_LINES {
        let (name, value) = pair(message, value_field)?;
        headers.push((name.bytes(), value.bytes()));
    }
    Ok(())
}

/// Decodes a message whose key is in field 1, and whose value is in field `value_field` or, if this
/// field is absent, in field 2.
fn pair(
    message: &[u8],
    value_field: u32,
) -> Result<(FieldValue<'_>, FieldValue<'_>), MalformedMessage> {
    let (mut key, mut value, mut text) = (FieldValue::Other, FieldValue::Other, FieldValue::Other);
    let mut fields = MessageFields::of(message);
    while let Some((number, field)) = fields.next()? {
        match number {
            1 => key = field,
            number if number == value_field => value = field,
            2 => text = field,
            _ => {}
        }
    }
    let value = if value == FieldValue::Other {
        text
    } else {
        value
    };
    Ok((key, value))
}

/// Decodes a peer's address. Returns `None` if the address is not an IP address.
fn address(peer: &[u8]) -> Result<Option<IpAddr>, MalformedMessage> {
    let mut found = None;
    let mut fields = MessageFields::of(peer);
    while let Some((number, value)) = fields.next()? {
        if number != 1 {
            continue;
        }
        let mut kinds = MessageFields::of(value.bytes());
        while let Some((number, value)) = kinds.next()? {
            if number != 1 {
                continue;
            }
            let mut parts = MessageFields::of(value.bytes());
            while let Some((number, value)) = parts.next()? {
                if number == 2 {
                    found = value.text()?.parse().ok();
                }
            }
        }
    }
    Ok(found)
}

/// Returns a string that may come from the client. Invalid UTF-8 is replaced by U+FFFD, so that the
/// request can still be counted.
fn lossy(value: FieldValue<'_>) -> Cow<'_, str> {
    String::from_utf8_lossy(value.bytes())
}
