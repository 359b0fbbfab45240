//! The xDS client, which opens the stream, sends ACKs and NACKs, and reconnects.

use std::{
    error::Error as _,
    hash::{BuildHasher, RandomState},
    iter,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures_util::stream;
use http::uri::PathAndQuery;
use prost_types::{Struct, Value, value::Kind};
use tidegate_config::envoy::{XdsConfig, XdsNode};
use tidegate_core::Span;
use tidegate_net::{file_watch::in_one_line, input::shown};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tonic::{Request, Streaming, client::Grpc, metadata::MetadataMap};
use tonic_prost::ProstCodec;

use super::{
    connection::{XdsConnection, origin},
    resources::{self, TYPE_URL},
    response::BoundedResponse,
    status::XdsStatus,
};
use crate::{
    FileMistake, LoadedConfig, RateLimitService,
    proto::{
        envoy::{
            config::core::v3::{Locality, Node},
            service::discovery::v3::{DiscoveryRequest, DiscoveryResponse},
        },
        google::rpc,
    },
};

const PATH: PathAndQuery = PathAndQuery::from_static(
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources",
);

/// The maximum number of queued requests. A small number is sufficient, because the client answers
/// one response at a time.
const QUEUED_REQUESTS: usize = 4;

/// The maximum time to send an ACK or NACK to a control plane that does not read.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// The time after which the client logs that the first configuration has not arrived.
const FIRST_CONFIG_NOTICE: Duration = Duration::from_secs(60);

/// The maximum length of the message in a NACK, in bytes.
const MAX_NACK_BYTES: usize = 8 << 10;

/// The status code in a NACK, `INVALID_ARGUMENT`.
const INVALID_ARGUMENT: i32 = 3;

/// A client that receives the rules of a [`RateLimitService`] from a control plane.
#[derive(Debug)]
pub struct XdsClient {
    config: XdsConfig,
    service: Arc<RateLimitService>,
    initial: InitialConfig,
    status: XdsStatus,
}

/// The reason why a session with the control plane has ended.
#[derive(Debug)]
struct SessionEnd {
    problem: String,
    /// The delay before the first attempt to reconnect, without jitter.
    first_wait: Span,
    /// Whether the control plane has sent a response in this session.
    has_responded: bool,
}

impl XdsClient {
    /// Creates a client. The client does not connect until [`Self::run`] is called.
    ///
    /// If a configuration is required, the service reports itself as unhealthy until the control
    /// plane has sent one.
    #[must_use]
    pub fn new(config: XdsConfig, service: Arc<RateLimitService>, initial: InitialConfig) -> Self {
        if initial == InitialConfig::Required {
            service.require_config();
        }
        Self {
            config,
            service,
            initial,
            status: XdsStatus::default(),
        }
    }

    /// Returns the service that uses the rules.
    #[must_use]
    pub fn service(&self) -> &Arc<RateLimitService> {
        &self.service
    }

    pub(crate) fn status(&self) -> &XdsStatus {
        &self.status
    }

    /// Returns the version of the active configuration; `None` before the first configuration.
    #[must_use]
    pub fn version(&self) -> Option<String> {
        self.status.lock().version.clone()
    }

    /// Returns whether a configuration is required and has not arrived yet.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.initial == InitialConfig::Required && self.status.lock().version.is_none()
    }

    /// Returns the errors in the last response. The list of errors is empty if the response was
    /// accepted.
    #[must_use]
    pub fn last_mistakes(&self) -> Vec<String> {
        self.status.lock().mistakes.clone()
    }

    /// Returns the warnings about the active configuration.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.status.lock().warnings.clone()
    }

    /// Returns the reason why the control plane currently cannot send configurations, if there is
    /// one.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.status.lock().problem.clone()
    }

    /// Receives configurations, and reconnects whenever the connection is lost. Never returns.
    pub async fn run(&self) {
        let mut failures = 0_u32;
        loop {
            let SessionEnd {
                problem,
                first_wait,
                has_responded,
            } = self.session().await;
            if has_responded {
                failures = 0;
            }
            let wait = self.wait(first_wait, failures);
            failures = failures.saturating_add(1);
            let server = &self.config.server;
            let state = match (self.version(), self.is_waiting()) {
                (Some(_), _) => "keeping the active rules",
                (None, true) => "rate limit requests fail until it sends a configuration",
                (None, false) => "no limits are active until it sends a configuration",
            };
            let retry_in_ms = wait.as_millis_ceil();
            tracing::warn!(%server, retry_in_ms, "no connection to the control plane; {state}: {problem}");
            {
                let mut state = self.status.lock();
                state.is_connected = false;
                state.problem = Some(format!("the control plane {server}: {problem}"));
            }
            pause(wait).await;
        }
    }

    /// Returns a random wait, which is `first` for attempt 0 and doubles with each attempt.
    fn wait(&self, first: Span, attempt: u32) -> Span {
        let random = RandomState::new().hash_one(attempt);
        self.config.backoff.wait(first, attempt, random)
    }

    /// Connects once, and receives configurations until the stream ends.
    async fn session(&self) -> SessionEnd {
        let counts = &self.status.counts;
        let connection = match XdsConnection::open(&self.config).await {
            Ok(connection) => connection,
            Err(error) => {
                counts.failed_connections.increment();
                return SessionEnd {
                    problem: error.to_string(),
                    first_wait: self.config.backoff.connect,
                    has_responded: false,
                };
            }
        };
        counts.connections.increment();
        let mut has_responded = false;
        let problem = self.follow(&connection, &mut has_responded).await;
        counts.ended_streams.increment();
        SessionEnd {
            problem,
            first_wait: self.config.backoff.initial,
            has_responded,
        }
    }

    /// Opens the stream, and applies responses until the stream ends. Returns the reason why it
    /// ended.
    async fn follow(&self, connection: &XdsConnection, has_responded: &mut bool) -> String {
        let (requests, receiver) = mpsc::channel(QUEUED_REQUESTS);
        let opened = pin!(self.open(connection, &requests, receiver));
        let mut responses = match self.with_notice(opened).await {
            Ok(responses) => responses,
            Err(problem) => return problem,
        };
        let mut rejections = 0_u32;
        loop {
            let message = pin!(responses.message());
            let response = match self.with_notice(message).await {
                Ok(Some(BoundedResponse(response))) => response,
                Ok(None) => return "the control plane has closed the stream".to_owned(),
                Err(status) => return describe(&status),
            };
            *has_responded = true;
            let Some(answer) = self.answer(&response) else {
                continue;
            };
            if answer.error_detail.is_none() {
                rejections = 0;
            } else {
                // Some control planes send the same response again after each NACK.
                if let Some(repetition) = rejections.checked_sub(1) {
                    pause(self.wait(self.config.backoff.initial, repetition)).await;
                }
                rejections = rejections.saturating_add(1);
            }
            match timeout(SEND_TIMEOUT, requests.send(answer)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return "the stream is closed".to_owned(),
                Err(_) => {
                    return format!("the control plane has read nothing for {SEND_TIMEOUT:?}");
                }
            }
        }
    }

    /// Opens the stream with the first request.
    async fn open(
        &self,
        connection: &XdsConnection,
        requests: &mpsc::Sender<DiscoveryRequest>,
        receiver: mpsc::Receiver<DiscoveryRequest>,
    ) -> Result<Streaming<BoundedResponse>, String> {
        // The channel is empty, so there is room.
        let _ = requests.try_send(self.request(String::new(), None));
        let outgoing = stream::unfold(receiver, |mut receiver| async {
            let request: DiscoveryRequest = receiver.recv().await?;
            Some((request, receiver))
        });
        let mut request = Request::new(outgoing);
        let headers = self.config.headers.iter().cloned().collect();
        *request.metadata_mut() = MetadataMap::from_headers(headers);
        let mut client = Grpc::with_origin(connection.service(), origin(&self.config))
            .max_decoding_message_size(self.config.max_message);
        client.ready().await.map_err(|error| error.to_string())?;
        {
            let mut state = self.status.lock();
            state.is_connected = true;
            state.problem = None;
        }
        tracing::info!(server = %self.config.server, "connected to the control plane");
        let codec = ProstCodec::<DiscoveryRequest, BoundedResponse>::default();
        let streaming = client.streaming(request, PATH, codec).await;
        streaming
            .map(tonic::Response::into_inner)
            .map_err(|status| describe(&status))
    }

    /// Waits for `event`. If the first configuration does not arrive within
    /// [`FIRST_CONFIG_NOTICE`], logs once that it is missing.
    async fn with_notice<F: Future + Unpin>(&self, mut event: F) -> F::Output {
        if self.status.lock().version.is_none() {
            if let Ok(output) = timeout(FIRST_CONFIG_NOTICE, &mut event).await {
                return output;
            }
            let server = &self.config.server;
            let problem =
                format!("the control plane {server} has sent no usable configuration yet");
            tracing::warn!(%server, after = ?FIRST_CONFIG_NOTICE, "{problem}; still waiting");
            self.status.lock().problem = Some(problem);
        }
        event.await
    }

    /// Applies a response, and returns the ACK or NACK. Returns `None` if the response contains
    /// resources of a type that the client has not requested.
    fn answer(&self, response: &DiscoveryResponse) -> Option<DiscoveryRequest> {
        let counts = &self.status.counts;
        if response.type_url != TYPE_URL {
            counts.ignored.increment();
            let found = shown(&response.type_url);
            tracing::warn!(
                "ignored a response of the control plane with resources of another type: {found}"
            );
            return None;
        }
        let read = resources::read(&response.resources, self.config.merging);
        self.status.lock().last_response = Some(self.service.now());
        let nonce = response.nonce.clone();
        match read {
            Ok(loaded) => {
                counts.accepted.increment();
                self.accept(response, loaded);
                Some(self.request(nonce, None))
            }
            Err(mistakes) => {
                counts.rejected.increment();
                let message = self.reject(response, &mistakes);
                let detail = rpc::Status {
                    code: INVALID_ARGUMENT,
                    message,
                };
                Some(self.request(nonce, Some(detail)))
            }
        }
    }

    /// Activates the rules in a response. The counters keep their values.
    fn accept(&self, response: &DiscoveryResponse, loaded: LoadedConfig) {
        let warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        let domains = loaded.domains();
        self.service.load(loaded);
        let version = shown(&response.version_info);
        let resources = response.resources.len();
        if domains == 0 {
            tracing::warn!(
                %version, resources,
                "the control plane configures no domain: requests from Envoy are not limited"
            );
        } else {
            let descriptors = self.service.descriptors();
            tracing::info!(
                %version, resources, domains, descriptors,
                "the configuration from the control plane is active"
            );
        }
        let mut state = self.status.lock();
        state.version = Some(response.version_info.clone());
        state.resources = resources;
        state.mistakes.clear();
        state.warnings = warnings;
        state.problem = None;
    }

    /// Records and logs the errors in a response. Returns the message for the NACK.
    fn reject(&self, response: &DiscoveryResponse, mistakes: &[FileMistake]) -> String {
        let mistakes: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        let line = in_one_line(&mistakes);
        tracing::error!(
            version = %shown(&response.version_info), mistakes = mistakes.len(),
            "rejected a configuration from the control plane, and kept the old rules: {line}"
        );
        self.status.lock().mistakes = mistakes;
        let end = line.floor_char_boundary(MAX_NACK_BYTES);
        line[..end].to_owned()
    }

    /// Returns a request with the active version.
    fn request(&self, nonce: String, error: Option<rpc::Status>) -> DiscoveryRequest {
        DiscoveryRequest {
            version_info: self.status.lock().version.clone().unwrap_or_default(),
            node: Some(node(&self.config.node)),
            // An empty list subscribes to all resources of the type.
            resource_names: Vec::new(),
            type_url: TYPE_URL.to_owned(),
            response_nonce: nonce,
            error_detail: error,
        }
    }
}

/// Whether the service is healthy before the control plane has sent a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialConfig {
    /// The service is unhealthy until it has a configuration.
    Required,
    /// The service is healthy, and returns errors until it has a configuration.
    Optional,
}

async fn pause(wait: Span) {
    sleep(Duration::from_micros(wait.as_micros())).await;
}

/// Returns the xDS node message that identifies this server.
fn node(node: &XdsNode) -> Node {
    let text = |text: &String| Value {
        kind: Some(Kind::StringValue(text.clone())),
    };
    let metadata = node.metadata.iter();
    let metadata = metadata.map(|(name, value)| (name.clone(), text(value)));
    let XdsNode {
        region,
        zone,
        sub_zone,
        ..
    } = node.clone();
    let has_locality = [&region, &zone, &sub_zone]
        .iter()
        .any(|text| !text.is_empty());
    Node {
        id: node.id.clone(),
        cluster: node.cluster.clone(),
        metadata: (!node.metadata.is_empty()).then(|| Struct {
            fields: metadata.collect(),
        }),
        locality: has_locality.then_some(Locality {
            region,
            zone,
            sub_zone,
        }),
        user_agent_name: "tidegate".to_owned(),
        user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// Describes a stream error. If the connection was lost, the description contains the cause.
fn describe(status: &tonic::Status) -> String {
    let message = shown(status.message());
    if status.code() == tonic::Code::OutOfRange {
        return format!(
            "{message}; raise `max_message` of envoy.config.xds, or XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES"
        );
    }
    let cause = iter::successors(status.source(), |&error| error.source()).last();
    let cause = cause.map_or_else(String::new, |cause| {
        format!(": {}", shown(&cause.to_string()))
    });
    format!("{:?}: {message}{cause}", status.code())
}
