//! The part of a control plane that is common to the control planes in Rust and in Python.

use tidegate_config::envoy::{XdsBackoff, XdsConfig, XdsServer};
use tidegate_core::Span;
use tidegate_envoy::xds::TYPE_URL;
use tonic::Code;

use super::convert::Resource;

/// A control plane, whose streams a test controls message by message.
pub(super) trait Plane: Sized {
    type Stream: Stream;

    /// Starts the control plane on an ephemeral port.
    async fn start() -> Self;

    /// Returns the next stream that a client opens.
    async fn accept(&mut self) -> Self::Stream;

    /// Returns the port to which a client must connect.
    fn port(&self) -> u16;

    /// Returns the settings of a client that reconnects immediately.
    fn config(&self) -> XdsConfig {
        client_of(&format!("127.0.0.1:{}", self.port()))
    }
}

/// A stream of the aggregated discovery service. Dropping it has the effect of [`End::Closed`].
pub(super) trait Stream: Sized {
    /// Returns the next request of the client.
    async fn request(&mut self) -> Request;

    async fn respond(&mut self, response: &Response<'_>);

    async fn end(&mut self, end: End);

    /// Reads the first request on the stream, which must subscribe with the active version.
    async fn subscribe(&mut self, version: &str) {
        self.request().await.assert_subscribes(version);
    }

    /// Sends resources, and returns the client's answer.
    async fn publish(&mut self, sent: &Sent<'_>, resources: &[Resource]) -> Result<(), String> {
        self.respond(&sent.response(resources)).await;
        self.request().await.answer_to(sent)
    }
}

/// The way in which a stream ends.
pub(super) enum End {
    Closed,
    /// The status is `UNAVAILABLE`.
    Failed,
    /// The TCP connection is broken.
    Broken,
}

/// A response with resources, and the version that is active before.
#[derive(Clone, Copy)]
pub(super) struct Sent<'a> {
    pub(super) version: &'a str,
    pub(super) nonce: &'a str,
    pub(super) before: &'a str,
}

impl<'a> Sent<'a> {
    pub(super) fn response(self, resources: &'a [Resource]) -> Response<'a> {
        Response {
            version: self.version,
            nonce: self.nonce,
            type_url: TYPE_URL,
            resources,
        }
    }
}

/// The fields of a `DiscoveryResponse`.
pub(super) struct Response<'a> {
    pub(super) version: &'a str,
    pub(super) nonce: &'a str,
    pub(super) type_url: &'a str,
    pub(super) resources: &'a [Resource],
}

/// The fields of a `DiscoveryRequest`.
pub(super) struct Request {
    pub(super) version: String,
    pub(super) nonce: String,
    pub(super) type_url: String,
    pub(super) has_node: bool,
    pub(super) resource_names: usize,
    /// The status code and the message of a NACK.
    pub(super) error: Option<(i32, String)>,
}

impl Request {
    /// Asserts that this is the first request on a stream. It has the active version.
    pub(super) fn assert_subscribes(&self, version: &str) {
        assert_eq!(self.type_url, TYPE_URL);
        assert_eq!((&*self.version, &*self.nonce), (version, ""));
        assert_eq!((self.error.as_ref(), self.resource_names), (None, 0));
        assert!(self.has_node);
    }

    /// Returns `Ok` for an ACK, and the error message of a NACK. The request must have the nonce of
    /// the response, and the version that is active after the response.
    pub(super) fn answer_to(self, sent: &Sent<'_>) -> Result<(), String> {
        assert_eq!((&*self.type_url, &*self.nonce), (TYPE_URL, sent.nonce));
        assert!(self.has_node);
        match self.error {
            None => {
                assert_eq!(self.version, sent.version, "an ACK has the new version");
                Ok(())
            }
            Some((code, message)) => {
                assert_eq!(self.version, sent.before, "a NACK has the active version");
                assert_eq!(code, Code::InvalidArgument as i32);
                Err(message)
            }
        }
    }
}

/// Returns the settings of a client that connects to the control plane at `address` and reconnects
/// immediately.
pub(super) fn client_of(address: &str) -> XdsConfig {
    let mut config = XdsConfig::new(XdsServer::parse(address).unwrap());
    config.backoff = XdsBackoff {
        connect: Span::from_millis(1),
        initial: Span::from_millis(1),
        max: Span::from_millis(5),
        ..XdsBackoff::default()
    };
    config
}
