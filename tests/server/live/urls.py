from django.urls import path

from . import views

urlpatterns = [
    path("count/<int:pk>/", views.count),
    path("count-class/<int:pk>/", views.Count.as_view()),
    path("acount/<int:pk>/", views.acount),
    path("busy/<int:pk>/", views.busy),
    path("abusy/<int:pk>/", views.abusy),
]
