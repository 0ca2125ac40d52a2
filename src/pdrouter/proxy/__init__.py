"""DATA PLANE. In order of flow: app, intake, dispatch, relay, replies."""
