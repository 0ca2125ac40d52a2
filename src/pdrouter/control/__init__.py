"""CONTROL PLANE. Feeds ``Router.observe`` with what the fleet says of itself."""
