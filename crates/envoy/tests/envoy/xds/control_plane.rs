//! The control plane in Rust.

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use futures_util::Stream;
use hyper::server::conn::http2;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use prost::Message as _;
use prost_types::Any;
use tidegate_config::envoy::XdsConfig;
use tidegate_envoy::{InitialConfig, RateLimitService, XdsClient, xds::TYPE_URL};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tonic::{Request, Response, Status, Streaming, metadata::MetadataMap};

use super::plane::{self, End, Plane, Sent, Stream as _};
use crate::{
    proto::{
        envoy::service::discovery::v3::{
            DiscoveryRequest, DiscoveryResponse,
            aggregated_discovery_service_server::{
                AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
            },
        },
        ratelimit::config::ratelimit::v3::RateLimitConfig,
    },
    support::TIMEOUT,
};

/// A control plane on an ephemeral port.
pub(super) struct ControlPlane {
    pub(super) address: SocketAddr,
    streams: mpsc::UnboundedReceiver<AdsStream>,
    _listener: JoinSet<()>,
}

/// A stream of the aggregated discovery service. Dropping the stream ends it.
pub(super) struct AdsStream {
    pub(super) headers: MetadataMap,
    requests: Streaming<DiscoveryRequest>,
    responses: mpsc::Sender<Result<DiscoveryResponse, Status>>,
    connection: AbortHandle,
}

impl ControlPlane {
    pub(super) async fn with_tls(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, streams) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (sender, tls) = (sender.clone(), tls.clone());
                let (abort, handle) = tokio::sync::oneshot::channel();
                let task = connections.spawn(async move {
                    let connection: AbortHandle = handle.await.unwrap();
                    match tls {
                        None => serve(stream, sender, connection).await,
                        // Ignore a failed handshake, because the client reports it too.
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve(stream, sender, connection).await;
                            }
                        }
                    }
                });
                abort.send(task).unwrap();
            }
        });
        Self {
            address,
            streams,
            _listener: tasks,
        }
    }
}

impl Plane for ControlPlane {
    type Stream = AdsStream;

    async fn start() -> Self {
        Self::with_tls(None).await
    }

    async fn accept(&mut self) -> AdsStream {
        let stream = timeout(TIMEOUT, self.streams.recv()).await;
        stream.expect("the client opens a stream").unwrap()
    }

    fn port(&self) -> u16 {
        self.address.port()
    }
}

/// A client that runs until it is dropped.
pub(super) struct RunningClient {
    pub(super) client: Arc<XdsClient>,
    _task: JoinSet<()>,
}

impl RunningClient {
    pub(super) fn start(config: XdsConfig, service: &Arc<RateLimitService>) -> Self {
        let client = XdsClient::new(config, Arc::clone(service), InitialConfig::Required);
        let client = Arc::new(client);
        let mut task = JoinSet::new();
        let running = Arc::clone(&client);
        task.spawn(async move { running.run().await });
        Self {
            client,
            _task: task,
        }
    }
}

async fn serve<S>(stream: S, streams: mpsc::UnboundedSender<AdsStream>, connection: AbortHandle)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = AggregatedDiscoveryServiceServer::new(Acceptor {
        streams,
        connection,
    });
    let builder = http2::Builder::new(TokioExecutor::new());
    // Ignore the error, because the test may break the connection on purpose.
    drop(
        builder
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
            .await,
    );
}

struct Acceptor {
    streams: mpsc::UnboundedSender<AdsStream>,
    connection: AbortHandle,
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Acceptor {
    type StreamAggregatedResourcesStream =
        Pin<Box<dyn Stream<Item = Result<DiscoveryResponse, Status>> + Send>>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let (responses, receiver) = mpsc::channel(16);
        let stream = AdsStream {
            headers: request.metadata().clone(),
            requests: request.into_inner(),
            responses,
            connection: self.connection.clone(),
        };
        self.streams
            .send(stream)
            .map_err(|_| Status::aborted("the test is over"))?;
        let outgoing = futures_util::stream::unfold(receiver, |mut receiver| async {
            Some((receiver.recv().await?, receiver))
        });
        Ok(Response::new(Box::pin(outgoing)))
    }
}

impl AdsStream {
    async fn message(&mut self) -> DiscoveryRequest {
        let request = timeout(TIMEOUT, self.requests.message()).await;
        let request = request.expect("the client sends a request").unwrap();
        request.expect("the stream is open")
    }

    /// Returns the first request on the stream, which must subscribe with the active version.
    pub(super) async fn subscription(&mut self, version: &str) -> DiscoveryRequest {
        let request = self.message().await;
        fields(&request).assert_subscribes(version);
        request
    }

    pub(super) async fn respond_with(&self, response: DiscoveryResponse) {
        self.responses.send(Ok(response)).await.unwrap();
    }

    /// Ends the stream with an error.
    pub(super) async fn fail(&self, status: Status) {
        self.responses.send(Err(status)).await.unwrap();
    }

    /// Sends a response, and returns the client's answer.
    pub(super) async fn send(
        &mut self,
        (version, nonce, before): (&str, &str, &str),
        resources: Vec<Any>,
    ) -> Result<(), String> {
        self.respond_with(response(version, nonce, resources)).await;
        let sent = Sent {
            version,
            nonce,
            before,
        };
        self.request().await.answer_to(&sent)
    }
}

impl plane::Stream for AdsStream {
    async fn request(&mut self) -> plane::Request {
        fields(&self.message().await)
    }

    async fn respond(&mut self, sent: &plane::Response<'_>) {
        let resources = sent.resources.iter().cloned();
        let resources = resources.map(|resource| packed(&resource.message().unwrap()));
        self.respond_with(DiscoveryResponse {
            type_url: sent.type_url.to_owned(),
            ..response(sent.version, sent.nonce, resources.collect())
        })
        .await;
    }

    async fn end(&mut self, end: End) {
        match end {
            End::Closed => self.responses = mpsc::channel(1).0,
            End::Failed => self.fail(Status::unavailable("restart")).await,
            End::Broken => self.connection.abort(),
        }
    }
}

fn fields(request: &DiscoveryRequest) -> plane::Request {
    let error = request.error_detail.as_ref();
    plane::Request {
        version: request.version_info.clone(),
        nonce: request.response_nonce.clone(),
        type_url: request.type_url.clone(),
        has_node: request.node.is_some(),
        resource_names: request.resource_names.len(),
        error: error.map(|status| (status.code, status.message.clone())),
    }
}

pub(super) fn response(version: &str, nonce: &str, resources: Vec<Any>) -> DiscoveryResponse {
    DiscoveryResponse {
        version_info: version.to_owned(),
        resources,
        type_url: TYPE_URL.to_owned(),
        nonce: nonce.to_owned(),
    }
}

pub(super) fn packed(config: &RateLimitConfig) -> Any {
    Any {
        type_url: TYPE_URL.to_owned(),
        value: config.encode_to_vec(),
    }
}
