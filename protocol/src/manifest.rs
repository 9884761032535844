//! Hashed manifests of data.
