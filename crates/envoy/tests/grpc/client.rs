//! A gRPC client for any service.

use std::net::SocketAddr;

use futures_util::{Stream, stream};
use prost::Message;
use tonic::{
    Request, Response, Status, Streaming,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

#[derive(Clone)]
pub(crate) struct Client(Grpc<Channel>);

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::over(Endpoint::from_shared(format!("http://{address}")).unwrap())
            .await
            .unwrap()
    }

    pub(crate) async fn over(endpoint: Endpoint) -> Result<Self, tonic::transport::Error> {
        endpoint
            .connect()
            .await
            .map(|channel| Self(Grpc::new(channel)))
    }

    pub(crate) async fn call<Q, A>(&mut self, path: &'static str, asked: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.request(path, Request::new(asked)).await
    }

    pub(crate) async fn request<Q, A>(
        &mut self,
        path: &'static str,
        request: Request<Q>,
    ) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.0
            .ready()
            .await
            .map_err(|error| Status::from_error(error.into()))?;
        let path = PathAndQuery::from_static(path);
        let answer = self.0.unary(request, path, ProstCodec::default()).await;
        answer.map(Response::into_inner)
    }

    /// Sends one request and returns the response stream.
    pub(crate) async fn watch<Q, A>(&mut self, path: &'static str, asked: Q) -> Streaming<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.stream(path, stream::iter([asked])).await.unwrap()
    }

    pub(crate) async fn stream<Q, A>(
        &mut self,
        path: &'static str,
        asked: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<A>, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.0.ready().await.unwrap();
        let path = PathAndQuery::from_static(path);
        let answers = self
            .0
            .streaming(Request::new(asked), path, ProstCodec::default());
        answers.await.map(Response::into_inner)
    }
}
