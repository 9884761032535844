//! The smallest HTTP client that reads a page from a process on this machine.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A page longer than this is refused.
const PAGE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Why a page could not be read.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Nobody listens, or the connection broke.
    #[error("cannot reach {0}: {1}")]
    Unreachable(String, std::io::Error),
    /// No answer in time.
    #[error("{0} does not answer")]
    Silent(String),
    /// The answer is no page.
    #[error("{0} answers: {1}")]
    Answer(String, String),
}

/// Reads `path` from the server at `host` (`ip:port`, or `http://ip:port`), within `bound`.
pub async fn get(host: &str, path: &str, bound: Duration) -> Result<Vec<u8>, HttpError> {
    let host = host.strip_prefix("http://").unwrap_or(host).trim_end_matches('/');
    let exchange = async {
        let mut stream = TcpStream::connect(host).await?;
        // Version 1.0: the answer is not chunked and ends with the connection.
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {host}\r\nAccept: application/json\r\n\r\n").as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(PAGE_BYTES_MAX).read_to_end(&mut answer).await?;
        Ok(answer)
    };
    let answer = tokio::time::timeout(bound, exchange).await.map_err(|_| HttpError::Silent(host.to_owned()))?;
    page(host, &answer.map_err(|error| HttpError::Unreachable(host.to_owned(), error))?)
}

/// The page within an answer.
fn page(host: &str, answer: &[u8]) -> Result<Vec<u8>, HttpError> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let Some(end) = end else { return Err(HttpError::Answer(host.to_owned(), "not HTTP".to_owned())) };
    let head = String::from_utf8_lossy(&answer[..end]);
    let status = head.lines().next().unwrap_or_default().to_owned();
    if status.split(' ').nth(1) != Some("200") {
        return Err(HttpError::Answer(host.to_owned(), status));
    }
    let length = head.lines().filter_map(|line| line.split_once(':')).find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let body = &answer[end + 4..];
    match length.and_then(|(_, value)| value.trim().parse::<usize>().ok()) {
        Some(length) if body.len() < length => Err(HttpError::Answer(host.to_owned(), format!("{} of {length} bytes", body.len()))),
        Some(length) => Ok(body[..length].to_vec()),
        None => Ok(body.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn answered(answer: &'static [u8]) -> Result<Vec<u8>, HttpError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let host = listener.local_addr().expect("bound").to_string();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await.expect("a request");
            assert!(request[..read].starts_with(b"GET /status HTTP/1.0\r\n"));
            stream.write_all(answer).await.expect("sent");
        });
        let result = get(&host, "/status", Duration::from_secs(10)).await;
        server.await.expect("the server does not fail");
        result
    }

    #[tokio::test]
    async fn a_page_is_what_follows_the_head() {
        assert_eq!(answered(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").await.expect("a page"), b"{}");
        assert_eq!(answered(b"HTTP/1.0 200 OK\r\n\r\n{}").await.expect("a page"), b"{}");
    }

    #[tokio::test]
    async fn anything_else_is_an_error() {
        let error = answered(b"HTTP/1.1 404 Not Found\r\n\r\n").await.expect_err("no page");
        assert!(error.to_string().ends_with("answers: HTTP/1.1 404 Not Found"), "{error}");
        let error = answered(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}").await.expect_err("cut short");
        assert!(error.to_string().ends_with("2 of 9 bytes"), "{error}");
        assert!(answered(b"hello").await.is_err());
    }

    #[tokio::test]
    async fn silence_is_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let host = listener.local_addr().expect("bound").to_string();
        assert!(matches!(get(&host, "/", Duration::from_millis(50)).await, Err(HttpError::Silent(_))));
    }
}
