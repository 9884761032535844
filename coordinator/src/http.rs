//! The run over HTTP: a server of a few pages, and a client for one of them.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

use crate::driver::Question;
use crate::status::Status;

/// How long a question may take, on either side.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// The longest answer that the client reads.
const ANSWER_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// What went wrong between `status` and a coordinator.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Nobody can listen there.
    #[error("cannot listen on {address} ({problem}); choose another --http")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        problem: String,
    },
    /// No coordinator answers.
    #[error("no coordinator answers at {address} ({problem}); is it running?")]
    Unreachable {
        /// Where.
        address: SocketAddr,
        /// Why not.
        problem: String,
    },
    /// Something answers that is no coordinator of this version.
    #[error("what answers at {address} is no skein-coordinator of this version ({problem}); check the address")]
    Foreign {
        /// Where.
        address: SocketAddr,
        /// What is odd.
        problem: String,
    },
}

/// Listens on `address`; what is returned says where, if its port was 0.
pub async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), HttpError> {
    let failure = |error: std::io::Error| HttpError::Listen { address, problem: error.to_string() };
    let listener = TcpListener::bind(address).await.map_err(failure)?;
    let bound = listener.local_addr().map_err(failure)?;
    Ok((listener, bound))
}

/// Serves until the process ends. Questions go to the driver.
pub async fn serve(listener: TcpListener, questions: mpsc::Sender<Question>) -> std::io::Result<()> {
    let router = Router::new().route("/", get(root)).route("/status", get(status)).with_state(questions);
    axum::serve(listener, router).await
}

/// Asks the coordinator at `address` for the run's status.
pub async fn fetch_status(address: SocketAddr) -> Result<Status, HttpError> {
    let unreachable = |problem: String| HttpError::Unreachable { address, problem };
    let answer = tokio::time::timeout(ANSWER_TIME_MAX, ask(address)).await;
    let answer = answer.map_err(|_| unreachable("no answer in time".to_owned()))?.map_err(|error| unreachable(error.to_string()))?;
    body_of(&answer).and_then(|body| serde_json::from_slice(body).map_err(|error| error.to_string())).map_err(|problem| HttpError::Foreign { address, problem })
}

async fn root() -> &'static str {
    "skein-coordinator: the run is at /status\n"
}

async fn status(State(questions): State<mpsc::Sender<Question>>) -> Response {
    let (question, answer) = oneshot::channel();
    let asked = async {
        questions.send(question).await.ok()?;
        answer.await.ok()
    };
    match tokio::time::timeout(ANSWER_TIME_MAX, asked).await {
        Ok(Some(status)) => Json(status).into_response(),
        Ok(None) | Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "the coordinator is busy or stopping\n").into_response(),
    }
}

async fn ask(address: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("GET /status HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
    Ok(answer)
}

/// The body of a successful answer, or what is wrong with it.
fn body_of(answer: &[u8]) -> Result<&[u8], String> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").ok_or("not HTTP")?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) == Some("200") { Ok(&answer[end + 4..]) } else { Err(format!("it says `{status}`")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    #[tokio::test]
    async fn the_status_arrives_as_it_was() {
        let (questions, mut asked) = mpsc::channel::<Question>(1);
        let (listener, address) = listen(loopback()).await.expect("listens");
        tokio::spawn(serve(listener, questions));
        let expected = Status { name: "run".to_owned(), losses: vec![(1, 0.5)], seconds_left: Some(2.5), ..Status::default() };
        let answer = expected.clone();
        tokio::spawn(async move {
            let question = asked.recv().await.expect("a question");
            question.send(answer).expect("someone waits");
        });
        assert_eq!(fetch_status(address).await.expect("answers"), expected);
        // The driver is gone.
        assert!(matches!(fetch_status(address).await, Err(HttpError::Foreign { .. })));
    }

    #[tokio::test]
    async fn failures_say_what_and_where() {
        let (listener, address) = listen(loopback()).await.expect("listens");
        let error = listen(address).await.expect_err("in use").to_string();
        assert!(error.starts_with(&format!("cannot listen on {address} (")) && error.ends_with("choose another --http"), "{error}");
        drop(listener);
        assert!(matches!(fetch_status(address).await, Err(HttpError::Unreachable { .. })));
    }

    #[test]
    fn only_a_successful_answer_has_a_body() {
        assert_eq!(body_of(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{}"), Ok(b"{}".as_slice()));
        assert_eq!(body_of(b"HTTP/1.1 404 Not Found\r\n\r\n"), Err("it says `HTTP/1.1 404 Not Found`".to_owned()));
        assert_eq!(body_of(b"SSH-2.0"), Err("not HTTP".to_owned()));
    }
}
