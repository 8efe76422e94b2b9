"""A small MCP server over stdio, as anybody might have one: it knows nothing of this project. Started by examples/mcp_tools.py.

    python examples/mcp_server.py
"""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("inventory")


@server.tool()
def stock(item: str) -> int:
    """How many pieces of an item are in stock."""
    return {"bolts": 17, "nuts": 40}[item]


if __name__ == "__main__":
    server.run()
