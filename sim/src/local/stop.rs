//! The user's wish to stop: Ctrl-C, SIGTERM, or a terminal that closes.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// How often the user has asked to stop. Clones see the same.
#[derive(Clone, Debug)]
pub struct Stop {
    count: watch::Receiver<u32>,
}

impl Stop {
    /// One that hears the process's signals. Must be called within a tokio runtime.
    pub fn on_signals() -> io::Result<Self> {
        let (mut interrupt, mut terminate, mut hang_up) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
        let (sender, stop) = Self::by_hand();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hang_up.recv() => {}
                }
                sender.send_modify(|count| *count += 1);
            }
        });
        Ok(stop)
    }

    /// One that hears the sender.
    pub fn by_hand() -> (watch::Sender<u32>, Self) {
        let (sender, count) = watch::channel(0);
        (sender, Self { count })
    }

    /// Waits until the user has asked to stop.
    pub async fn requested(&mut self) {
        self.times(1).await;
    }

    /// Waits until the user has insisted.
    pub async fn insisted(&mut self) {
        self.times(2).await;
    }

    async fn times(&mut self, times: u32) {
        if self.count.wait_for(|count| *count >= times).await.is_err() {
            // Nobody is left who could ask.
            std::future::pending::<()>().await;
        }
    }
}
