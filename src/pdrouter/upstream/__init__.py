"""CARRIES bytes to engines: HTTP/1.1 connections and their pools."""
